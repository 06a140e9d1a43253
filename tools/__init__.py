"""What runs, stores and checks the notebooks. The library imports nothing from here.

    python -m tools.run_notebooks      execute all of them in order into build/, also as HTML
    python -m tools.store_notebooks    execute and write them back with outputs and pictures, for committing
    python -m tools.check_notebooks    check the committed files against the rules
    python -m tools.check_ran FILE     check that a pytest report shows every notebook cell as run
"""
