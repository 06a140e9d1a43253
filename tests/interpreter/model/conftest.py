"""Makes `random_models` of the model's tests importable here."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "gptoss_lab" / "model"))
