"""Each rule catches a notebook that breaks it: a good one is made, one thing is broken, and that rule must object."""
import copy
import json

import nbformat
import pytest

from tools import check_notebooks
from tools.notebooks import PLOTLY
from tools.rules import RULES, WIDGET, problems

PIXEL = "iVBORw0KGgo="


def code(source, count, *outputs, tags=()):
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs), execution_count=count)
    cell.metadata["tags"] = list(tags)
    return cell


def display(**data):
    return nbformat.v4.new_output("display_data", data=data)


def good():
    """A notebook that keeps every rule, with a figure, a widget and three exercises."""
    text = nbformat.v4.new_markdown_cell
    stream = nbformat.v4.new_output("stream", name="stdout", text="20 tensors\n")
    exercise = text("Question?\n\n<details><summary>Answer</summary>\n4\n</details>")
    cells = [
        text("# Title"), text("## Predict\n\nHow many?"),
        code("print('20 tensors')", 1, stream, tags=["headline", "nbval-check-output"]),
        code("figure()", 2, display(**{PLOTLY: {"data": [], "layout": {}}, "image/png": PIXEL})),
        code("sliders()", 3, display(**{"text/plain": "A slider over the window.", WIDGET: {"model_id": "a"}})),
        text("## Takeaway\n\nOne."), text("## Exercises"),
    ]
    for count in (4, 5, 6):
        cells += [exercise.copy(), code("assert 2 + 2 == 4", count, tags=["exercise"])]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def cell(notebook, number):
    return [c for c in notebook.cells if c.cell_type == "code"][number - 1]


def set_count(nb):
    cell(nb, 2).execution_count = 7


def forget_count(nb):
    cell(nb, 2).execution_count = None


def store_error(nb):
    cell(nb, 2).outputs.append(nbformat.v4.new_output("error", ename="ValueError", evalue="x", traceback=[]))


def store_stderr(nb):
    cell(nb, 2).outputs.append(nbformat.v4.new_output("stream", name="stderr", text="careful"))


def drop_outputs(nb):
    for one in nb.cells:
        if one.cell_type == "code":
            one.outputs = []


def drop_checked_output(nb):
    cell(nb, 1).outputs = []


def store_widget_state(nb):
    nb.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"version_major": 2}}


def drop_widget_text(nb):
    del cell(nb, 3).outputs[0].data["text/plain"]


def name_the_widget_only(nb):
    cell(nb, 3).outputs[0].data["text/plain"] = "VBox(children=(IntSlider(value=3),))"


def widget_first(nb):
    one, two = (nb.cells.index(cell(nb, n)) for n in (2, 3))
    nb.cells[one], nb.cells[two] = nb.cells[two], nb.cells[one]


def drop_picture(nb):
    del cell(nb, 2).outputs[0].data["image/png"]


def path_in_output(nb):
    cell(nb, 1).outputs[0].text = "loaded /home/someone/model"


def path_in_rich_output(nb):
    cell(nb, 2).outputs.append(display(**{"text/html": "<b>C:\\Users\\someone</b>"}))


def path_in_source(nb):
    nb.cells[0].source = "# Title\n\nsee /Users/someone/x"


def progress_bar(nb):
    cell(nb, 1).outputs[0].text = " 50%|#####     | 1/2"


def rewritten_line(nb):
    cell(nb, 1).outputs[0].text = "1 of 2\r2 of 2"


def long_cell(nb):
    cell(nb, 2).source = "x = 1\n" * 26


def wide_cell(nb):
    cell(nb, 2).source = "x = '" + "a" * 100 + "'"


def definition(nb):
    cell(nb, 2).source = "def helper():\n    return 1"


def magic(nb):
    cell(nb, 2).source = "%pip install something"


def other_kernel(nb):
    nb.metadata.kernelspec["name"] = "my-kernel"


def no_prediction(nb):
    nb.cells[1].source = "How many?"


def two_takeaways(nb):
    nb.cells[0].source += "\n\n## Takeaway"


def open_answer(nb):
    nb.cells[7].source = "Question? The answer is 4."


def leaking_answer(nb):
    nb.cells[7].source = "Question?\n\n<details><summary>Answer</summary>\n\n4\n\n</details>"


def unchecked_answer(nb):
    cell(nb, 5).source = "print(4)"


def no_headline(nb):
    cell(nb, 1).metadata["tags"] = []


BREAKS = {
    "counts": (set_count, forget_count), "errors": (store_error, store_stderr),
    "stored": (drop_outputs, drop_checked_output), "widget_state": (store_widget_state,),
    "widget_fallback": (drop_widget_text, name_the_widget_only, widget_first), "pictures": (drop_picture,),
    "local_paths": (path_in_output, path_in_rich_output, path_in_source),
    "progress_bars": (progress_bar, rewritten_line), "short_cells": (long_cell, wide_cell),
    "no_definitions": (definition, magic), "kernel": (other_kernel,),
    "lesson": (no_prediction, two_takeaways, open_answer, leaking_answer, unchecked_answer, no_headline),
}


def test_the_good_notebook_is_good():
    assert problems(good()) == []


@pytest.mark.parametrize(("rule", "change"), [(r, c) for r, changes in BREAKS.items() for c in changes],
                         ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_broken_notebook_is_caught_by_its_rule(rule, change):
    notebook = good()
    change(notebook)
    found = {r.__name__: list(r(notebook)) for r in RULES}
    assert found[rule], f"{rule} did not object"
    assert all(isinstance(line, str) and "\n" not in line for line in found[rule])


def test_every_rule_has_a_notebook_that_breaks_it():
    assert {r.__name__ for r in RULES} == set(BREAKS)


def test_an_invalid_file_is_caught(tmp_path, capsys):
    broken = json.loads(nbformat.writes(good()))
    del broken["cells"][2]["source"]
    file = tmp_path / "00_broken.ipynb"
    file.write_text(json.dumps(broken))
    assert check_notebooks.main([str(file)]) == 1
    assert "00_broken.ipynb: not a valid notebook" in capsys.readouterr().out


def test_a_file_that_is_no_notebook_is_caught(tmp_path, capsys):
    for number, content in enumerate((b"not json", b"[1, 2]", b"\xff\xfe")):
        file = tmp_path / f"{number:02d}.ipynb"
        file.write_bytes(content)
        assert check_notebooks.main([str(file)]) == 1
        assert "cannot be read" in capsys.readouterr().out


def test_the_check_passes_a_good_file_and_names_every_problem_of_a_bad_one(tmp_path, capsys):
    file = tmp_path / "00_good.ipynb"
    nbformat.write(good(), file)
    assert check_notebooks.main([str(file)]) == 0
    bad = copy.deepcopy(good())
    drop_picture(bad)
    long_cell(bad)
    nbformat.write(bad, file)
    assert check_notebooks.main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert "without its PNG" in printed and "26 lines" in printed


def test_a_url_or_a_fraction_is_no_local_path():
    notebook = good()
    cell(notebook, 1).outputs[0].text = "https://example.org/data/x and kv/head and 3/4 of 60 GiB"
    assert problems(notebook) == []
