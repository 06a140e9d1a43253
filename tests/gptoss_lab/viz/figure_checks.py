"""What every figure has: a title that says something, a mark of origin, the one style, labelled axes, a small file."""
import json

from gptoss_lab.viz import style


def check_style(figure):
    assert len(figure.layout.title.text) > 10
    assert figure.layout.title.subtitle.text.split(" · ")[0] in style.ORIGINS
    assert figure.layout.template.layout.font.family == style.FONT


def check_figure(figure, y_titles=True, most=60_000):
    """y_titles: False where rows are named on the axis. most: characters of JSON."""
    check_style(figure)
    assert all(axis.title.text for axis in figure.select_xaxes())
    assert not y_titles or all(axis.title.text for axis in figure.select_yaxes())
    text = figure.to_json()
    assert len(text) < most and "NaN" not in text and json.loads(text)["data"]
