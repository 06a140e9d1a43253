"""How the nano checkpoint is made. Nothing that runs a model imports this package."""
