"""A Harmony conversation token by token: what is structure, what is text, and whose text it is.

`gptoss_lab.harmony.spans` says what each token is, with the library's own parser; here it is drawn. In a notebook a
`Conversation` is coloured HTML; where HTML is not shown its text form marks the same things with bars.
"""
from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass

from gptoss_lab.harmony.ids import START
from gptoss_lab.harmony.show import Span, spans

LOOK = {                          # kind: (background, text colour, what the legend says)
    "marker": ("#22303c", "#ffffff", "structure: one special token"),
    "stray": ("#b23b28", "#ffffff", "a special token out of place"),
    "header": ("#dfe5ea", "#22303c", "header: role, channel, recipient, format"),
    "system": ("#efe9f5", "#22303c", "system text"),
    "developer": ("#e0d5ee", "#22303c", "developer text"),
    "user": ("#dcebdf", "#22303c", "user text"),
    "tool": ("#cfe9e9", "#22303c", "tool result"),
    "analysis": ("#f6ecd2", "#22303c", "analysis: chain of thought"),
    "commentary": ("#f6d9c4", "#22303c", "commentary: tool calls"),
    "final": ("#d2e4f7", "#22303c", "final: the answer"),
    "assistant": ("#f3f4f6", "#22303c", "assistant, no channel"),
}
_FRAME = ("font-family:ui-monospace,Menlo,DejaVu Sans Mono,monospace;font-size:13px;line-height:1.9;"
          "color:#22303c;background:#ffffff;padding:8px")


@dataclass(frozen=True)
class Conversation:
    """Coloured tokens: `_repr_html_` for notebooks, `str` for everything else."""

    spans: tuple[Span, ...]

    def __str__(self) -> str:
        return as_text(self.spans)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.spans)


def show(ids: Iterable[int], role: str | None = None) -> Conversation:
    """The tokens of a whole conversation, or, with `role`, of what the model wrote after <|start|> and that role.

    Any ids of the vocabulary, well formed or not; TokenIdError for one that the model lacks.
    """
    return Conversation(tuple(spans(ids, role)))


def look_of(span: Span) -> str:
    """The key of LOOK for one span: its part in the structure, or for text the channel, else the role."""
    if span.kind in ("marker", "stray"):
        return span.kind
    if span.kind != "text":
        return "header"
    if span.role == "assistant" and span.channel in LOOK:
        return span.channel
    return span.role if span.role in LOOK else "assistant"


def as_text(found: Iterable[Span]) -> str:
    """One message per line: markers as they are spelled, other tokens separated by a thin bar, newlines as ⏎."""
    lines, line = [], ""
    for span in found:
        if START in span.ids and line:
            lines.append(line)
            line = ""
        bar = "" if span.kind == "marker" or not line or line.endswith("|>") else "¦"
        line += bar + span.text.replace("\n", "⏎")
    return "\n".join([*lines, line] if line else lines)


def as_html(found: Iterable[Span]) -> str:
    """Every token a coloured box with its ids as tooltip, a new line at each message, and the legend of what occurs."""
    found = list(found)
    occurring = {look_of(span) for span in found}
    legend = " ".join(f'<span style="{_css(look)}">{LOOK[look][2]}</span>' for look in LOOK if look in occurring)
    return (f'<div style="{_FRAME}">{"".join(map(_box, found))}'
            f'<div style="margin-top:10px;font-size:12px">{legend}</div></div>')


def _box(span: Span) -> str:
    text = html.escape(span.text).replace("\n", "⏎").replace(" ", "&nbsp;")
    lead = "<br>" if START in span.ids else ""
    ids = " ".join(map(str, span.ids))
    return f'{lead}<span title="{ids}" style="{_css(look_of(span))}">{text}</span><wbr>'


def _css(look: str) -> str:
    background, colour, _ = LOOK[look]
    return f"background:{background};color:{colour};border-radius:3px;padding:1px 2px;margin:0 1px"
