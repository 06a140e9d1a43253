"""Where the project keeps what it makes once: the vocabulary, the nano checkpoint, converted copies."""
from __future__ import annotations

import os
from pathlib import Path

import platformdirs

SETTING = "GPTOSS_LAB_CACHE"


def cache_folder() -> Path:
    """$GPTOSS_LAB_CACHE, or `gptoss-lab` in the platform's folder for a user's caches. Not created here."""
    named = os.environ.get(SETTING)
    return Path(named) if named else platformdirs.user_cache_path("gptoss-lab", appauthor=False)
