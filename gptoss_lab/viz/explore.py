"""Sliders over a pure function, with a sentence for readers who have no running kernel.

A stored notebook keeps no widget state, so a widget's cell must say in words what it would show. `sliders` publishes
the widget and that sentence together; the static figure of the same function stands in the cell before it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets
from IPython.display import display

VIEW = "application/vnd.jupyter.widget-view+json"


def sliders(function: Callable[..., Any], sentence: str, **controls: ipywidgets.Widget) -> None:
    """Show `function(**values of the controls)` below the controls, again whenever one of them moves.

    function: a pure function that returns something a cell can display. sentence: what the widget shows, for a reader
    of the stored notebook. ValueError if it is empty.
    """
    if not sentence.strip():
        raise ValueError("sliders: a sentence is needed for readers without a running kernel")
    output = ipywidgets.Output()

    def redraw(*_: Any) -> None:
        result = function(**{name: control.value for name, control in controls.items()})
        with output:
            output.clear_output(wait=True)
            display(result)

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    box = ipywidgets.VBox([*controls.values(), output])
    bundle = {"text/plain": sentence, VIEW: {"version_major": 2, "version_minor": 0, "model_id": box.model_id}}
    display(bundle, raw=True)
