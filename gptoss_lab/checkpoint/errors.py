"""The one error of this package: a checkpoint that is not what it should be, said in one line."""
from __future__ import annotations


class CheckpointError(ValueError):
    """What was wrong, the value, and what would be right; the message names the file or the tensor."""
