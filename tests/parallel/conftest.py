"""Makes `rank_work` importable here and in the ranks' processes."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
