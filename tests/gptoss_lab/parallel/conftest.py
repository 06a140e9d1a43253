"""Makes `parallel_cases` importable from the tests beside it, and a small checkpoint for all of them."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a small checkpoint in the released form."""
    from parallel_cases import small_nano

    from gptoss_lab.checkpoint import synth

    folder = tmp_path_factory.mktemp("parallel") / "small"
    synth(small_nano(), folder)
    return folder
