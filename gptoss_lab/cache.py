"""Where the project keeps what it makes once: the vocabulary, the nano checkpoint, converted copies."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:         # Windows: nobody waits
    fcntl = None

SETTING = "GPTOSS_LAB_CACHE"


def cache_folder() -> Path:
    """$GPTOSS_LAB_CACHE, or `gptoss-lab` in the platform's folder for a user's caches. Not created here."""
    named = os.environ.get(SETTING)
    return Path(named) if named else platformdirs.user_cache_path("gptoss-lab", appauthor=False)


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, by make(path) if it is not there. Who else wants it meanwhile, a second notebook for example, waits.

    Errors are make's, unless the path is there all the same, by somebody whom no lock could hold.
    """
    if not path.exists():
        with _alone(path):
            try:
                if not path.exists():
                    make(path)
            except Exception:
                if not path.exists():
                    raise
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock beside `path`. Where none can be made, making will say why nothing can be written there."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(path.with_name(f"{path.name}.lock"), "w", encoding="utf-8"))
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)                        # until the file is closed
        yield
