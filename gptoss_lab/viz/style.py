"""The one look of all figures, and the mark that says where a figure's numbers come from.

Importing this module registers the plotly template "gptoss" and makes figures leave a cell as plotly JSON only. The
other renderers would store a copy of plotly's library (4.5 MB) in every notebook.
"""
from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import plotly.io as pio

INK, MUTED, GRID = "#22303c", "#66757f", "#e3e8ec"
BLUE, RED, GREEN, OCHRE, PURPLE, TEAL, GREY = (
    "#2f6db5", "#c5513b", "#4c8c5a", "#c79a2b", "#7b5c9e", "#3b9a9c", "#98a4ae",
)
PALETTE = (BLUE, RED, GREEN, OCHRE, PURPLE, TEAL, GREY)
SEQUENTIAL = ((0.0, "#f3f7fb"), (0.25, "#c7dbee"), (0.5, "#86b2da"), (0.75, "#3f7fbe"), (1.0, "#123f73"))
DIVERGING = ((0.0, "#b23b28"), (0.5, "#fafafa"), (1.0, "#1f5a9e"))

ORIGINS = {
    "live": "computed here, now",
    "recorded": "from a file of data/measured",
    "published": "from the source named",
    "modelled": "from a formula",
}
FONT = "Open Sans, DejaVu Sans, Helvetica, Arial, sans-serif"


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": GRID, "linecolor": MUTED, "zeroline": False, "ticks": "outside", "tickcolor": MUTED,
        "showline": True, "automargin": True, "title": {"standoff": 10, "font": {"size": 13}},
    }


pio.templates["gptoss"] = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": INK},
        "title": {"x": 0.0, "xref": "paper", "xanchor": "left", "y": 1.0, "yref": "container", "yanchor": "top",
                  "pad": {"t": 14, "b": 10}, "font": {"size": 16},
                  "subtitle": {"font": {"size": 12, "color": MUTED}}},
        "colorway": list(PALETTE), "paper_bgcolor": "white", "plot_bgcolor": "white",
        "margin": {"l": 70, "r": 30, "t": 86, "b": 60}, "width": 860, "height": 420,
        "xaxis": _axis(), "yaxis": _axis(), "hoverlabel": {"font": {"family": FONT}},
        "legend": {"orientation": "h", "x": 0.0, "xanchor": "left", "y": -0.3, "yanchor": "top"},
        "modebar": {"remove": ["zoom", "pan", "select", "lasso", "zoomin", "zoomout", "autoscale"],
                    "bgcolor": "rgba(0,0,0,0)"},
        "colorscale": {"sequential": [list(p) for p in SEQUENTIAL], "diverging": [list(p) for p in DIVERGING]},
    },
    data={"heatmap": [{"colorbar": {"title": {"font": {"size": 12}}, "outlinewidth": 0, "thickness": 14}}]},
)
pio.renderers.default = "plotly_mimetype"


def mark(origin: str, what: str) -> str:
    """The subtitle of a figure: its origin and what the numbers are. ValueError for an origin that does not exist."""
    if origin not in ORIGINS:
        raise ValueError(f"origin is {origin!r}; one of {', '.join(ORIGINS)} is expected")
    return f"{origin} · {what}"


def finish(figure: go.Figure, title: str, origin: str, what: str, **layout: Any) -> go.Figure:
    """Give a figure the template, its title (the finding, as a sentence) and its mark of origin.

    origin: live, recorded, published or modelled. what: one line naming model, input or source. layout: passed on.
    """
    figure.update_layout(template="gptoss", title={"text": title, "subtitle": {"text": mark(origin, what)}}, **layout)
    return figure


def binary(count: float) -> str:
    """Bytes with a binary unit: 65,248,815,744 is '60.8 GiB', 12 is '12 B'."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
