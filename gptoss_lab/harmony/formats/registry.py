"""Formats by name: the two of this package, and those that other packages register.

A package adds a format with an entry point of the group `gptoss_lab.chat_formats`: name = "module:Class", a class that
is made without arguments and has what `protocol.ChatFormat` says. Nothing is imported before it is asked for.
"""
from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from gptoss_lab.harmony.errors import HarmonyError
from gptoss_lab.harmony.formats.chatml import ChatML
from gptoss_lab.harmony.formats.harmony_format import Harmony
from gptoss_lab.harmony.formats.protocol import ChatFormat

GROUP = "gptoss_lab.chat_formats"
_OWN = {"harmony": Harmony, "chatml": ChatML}
_METHODS = ("render", "reader", "stop_ids", "token_bytes")


class FormatError(HarmonyError):
    """A chat format that is not there or is none."""


def format_names() -> list[str]:
    """Return the names that `choose_format` takes, our own first."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=GROUP)} - set(_OWN))]


def choose_format(name: str) -> ChatFormat:
    """Return the format called `name`; a plug-in cannot take the name of one of ours. Raises `FormatError`."""
    if name in _OWN:
        return _OWN[name]()
    points = list(entry_points(group=GROUP, name=name))
    if not points:
        raise FormatError(f"chat format {name!r} is unknown; use one of {', '.join(format_names())}")
    return _loaded(points[0])


def _loaded(point: EntryPoint) -> ChatFormat:
    try:
        made = point.load()()
    except (ImportError, AttributeError, TypeError) as error:
        raise FormatError(f"chat format {point.name!r} ({point.value}) cannot be loaded: {error}") from None
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise FormatError(f"chat format {point.name!r} ({point.value}) lacks {', '.join(missing)}")
    return made
