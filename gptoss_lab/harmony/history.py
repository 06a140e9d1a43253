"""Which reasoning of earlier turns the model sees again.

What: the rule that drops chain of thought from a conversation before it is rendered. How: a pure function over a list.
Rules by name:
  "format"     the format's own text: once the assistant has given a `final` message, its analysis up to there is
               dropped. What comes after the last `final` is kept, so reasoning stays while a tool call is open.
  "reference"  what openai-harmony 0.0.8 does: it drops only up to the *first* `final`, and only when the assistant's
               last message is a `final`; the reasoning of later turns stays.
  "all"        nothing is dropped.
Calls on the analysis channel (the built-in tools) are chain of thought and go with it, together with their results.
What is lost: the model's reasons for its earlier answers, as it was trained to have it, and the part of the prefix
cache after the first message that was dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from gptoss_lab.harmony.errors import RenderError
from gptoss_lab.harmony.messages import Message

RULES = ("format", "reference", "all")


def prune(messages: Sequence[Message], rule: str = "format") -> list[Message]:
    """Return `messages` without the reasoning that `rule` drops. `RenderError` for an unknown rule."""
    if rule not in RULES:
        raise RenderError(f"history rule {rule!r} is unknown; use one of {', '.join(RULES)}")
    finals = [i for i, message in enumerate(messages) if message.role == "assistant" and message.channel == "final"]
    if rule == "all" or not finals:
        return list(messages)
    if rule == "format":
        return _without_analysis(messages[: finals[-1]]) + list(messages[finals[-1] :])
    if finals[-1] != max(i for i, message in enumerate(messages) if message.role == "assistant"):
        return list(messages)
    return [m for m in messages[: finals[0]] if m.channel != "analysis"] + list(messages[finals[0] :])


def _without_analysis(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` without what stands on the analysis channel, and without the results of calls made there."""
    kept, dropped_calls = [], {}
    for message in messages:
        if message.role == "tool" and message.name in dropped_calls:
            drop = dropped_calls[message.name]
        else:
            drop = message.role in ("assistant", "tool") and message.channel == "analysis"
        if message.is_tool_call:
            dropped_calls[message.recipient] = drop
        if not drop:
            kept.append(message)
    return kept
