"""The tools do what their exit codes say: run, store, and notice a report in which a cell was not run."""
import asyncio
import base64
import shutil
from queue import Empty

import nbformat
import pytest

from tools import check_ran, notebooks, run_notebooks, store_notebooks
from tools.notebooks import PLOTLY, CellFailed, Channel, Manager, code_cells, execute, find, headline

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
FIGURE = ("import plotly.io as pio, plotly.graph_objects as go\npio.renderers.default = 'plotly_mimetype'\n"
          "go.Figure(go.Bar(x=[1], y=[2]))")


def write(folder, name, *sources, tags=None):
    cells = []
    for source in sources:
        text = source.startswith("#")
        cells.append(nbformat.v4.new_markdown_cell(source) if text else nbformat.v4.new_code_cell(source))
        if not text:
            cells[-1].metadata["tags"] = (tags or {}).get(source, [])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    folder.mkdir(exist_ok=True)
    nbformat.write(notebook, folder / name)
    return folder / name


def lesson(folder, name="00_a.ipynb", extra="1 + 1"):
    """A notebook that may be stored once it is executed."""
    fold = "\n\n<details><summary>Answer</summary>4</details>"
    checks = [f"assert {n} + 2 == {n + 2}" for n in range(3)]
    tags = {"print('two')": ["headline"], **{check: ["exercise"] for check in checks}}
    return write(folder, name, "# T\n\n## Predict\n\n## Takeaway\n\n## Exercises" + 3 * fold, "print('two')", FIGURE,
                 extra, *checks, tags=tags)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command line of run_notebooks on the notebooks of a folder of the test."""
    monkeypatch.setattr(run_notebooks, "find", lambda names: find(names, tmp_path / "notebooks"))
    return lambda *arguments: run_notebooks.main([*arguments, "--output", str(tmp_path / "build")])


def test_run_executes_in_order_and_prints_time_and_headline(tmp_path, run, capsys):
    lesson(tmp_path / "notebooks", "01_b.ipynb")
    source = lesson(tmp_path / "notebooks", "00_a.ipynb")
    before = source.read_bytes()
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["00_a", "01_b"]
    assert all(line.endswith("two") and " s " in line for line in lines[:2])
    assert source.read_bytes() == before
    assert nbformat.read(tmp_path / "build" / "00_a.ipynb", 4).cells[1].execution_count == 1


def test_a_page_draws_its_figures_without_a_network(tmp_path, run):
    lesson(tmp_path / "notebooks")
    assert run() == 0
    page = (tmp_path / "build" / "00_a.html").read_text()
    assert "Plotly.newPlot" in page and 'src="plotly.min.js"' in page
    assert (tmp_path / "build" / "plotly.min.js").stat().st_size > 1e6
    assert "https://cdn" not in page


def test_a_failing_cell_is_shown_and_stops_the_run(tmp_path, run, capsys):
    lesson(tmp_path / "notebooks", "00_a.ipynb", extra="raise ValueError('of this kind')")
    lesson(tmp_path / "notebooks", "01_b.ipynb")
    assert run() == 1
    shown = capsys.readouterr()
    assert "raise ValueError('of this kind')" in shown.err and "ValueError: of this kind" in shown.err
    assert "01_b" not in shown.out and not (tmp_path / "build" / "01_b.ipynb").exists()
    assert run("01") == 0


def test_a_cell_that_hangs_is_stopped_and_shown(tmp_path, run, capsys):
    lesson(tmp_path / "notebooks", extra="import time; time.sleep(60)")
    assert run("--timeout", "3") == 1
    assert "time.sleep(60)" in capsys.readouterr().err


@pytest.mark.parametrize(("looks", "timeout"), [(1, None), (4, None), (4, 10.0), (4, 0.03)])
def test_an_answer_whose_wake_up_is_lost_is_found_by_looking_again(monkeypatch, looks, timeout):
    """A socket that never wakes its reader, and shows what is there when it is asked for the `looks`-th time."""
    waits = []

    async def get_msg(self, timeout):
        await asyncio.sleep(timeout)
        waits.append(timeout)
        if len(waits) < looks:
            raise Empty
        return {"msg_type": "execute_reply"}

    monkeypatch.setattr(notebooks.AsyncZMQSocketChannel, "get_msg", get_msg)
    monkeypatch.setattr(notebooks, "LOOK_AGAIN", 0.02)
    look = Channel.__new__(Channel).get_msg(timeout)
    if timeout == 0.03:
        with pytest.raises(Empty):
            asyncio.run(look)
        assert len(waits) == 2 and sum(waits) == pytest.approx(0.03, abs=0.02)
    else:
        assert asyncio.run(look)["msg_type"] == "execute_reply" and waits == [0.02] * looks


def test_clients_have_such_channels():
    assert all(isinstance(channel, Channel) for channel in (Manager().client().shell_channel,
                                                            Manager().client().iopub_channel))


def test_an_unknown_name_and_an_empty_folder_are_errors(tmp_path, run, capsys):
    (tmp_path / "notebooks").mkdir()
    assert run() == 2
    lesson(tmp_path / "notebooks")
    assert run("07") == 2
    assert "no notebook starts with '07'" in capsys.readouterr().err


def test_storing_adds_pictures_and_drops_what_varies(tmp_path):
    path = lesson(tmp_path / "notebooks")
    drawn = []
    store_notebooks.store(path, lambda figure: drawn.append(figure) or PIXEL)
    notebook = nbformat.read(path, 4)
    assert [c.execution_count for c in code_cells(notebook)] == [1, 2, 3, 4, 5, 6]
    output = code_cells(notebook)[1].outputs[0]
    assert drawn == [output.data[PLOTLY]] and base64.b64decode(output.data["image/png"]) == PIXEL
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    assert headline(notebook) == "two"


@pytest.mark.parametrize("bad", ["print('/home/' + 'someone')", "import sys; print('careful', file=sys.stderr)",
                                 "print('50%' + '|###')"])
def test_what_breaks_a_rule_is_not_stored(tmp_path, bad):
    path = lesson(tmp_path / "notebooks", extra=bad)
    before = path.read_bytes()
    with pytest.raises(store_notebooks.NotStored, match="00_a.ipynb"):
        store_notebooks.store(path, lambda figure: PIXEL)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_failing_notebook_is_not_stored(tmp_path):
    path = lesson(tmp_path / "notebooks", extra="1 / 0")
    before = path.read_bytes()
    with pytest.raises(CellFailed, match="ZeroDivisionError"):
        store_notebooks.store(path, lambda figure: PIXEL)
    assert path.read_bytes() == before


@pytest.mark.skipif(not (shutil.which("chromium") or shutil.which("google-chrome")), reason="drawing needs Chromium")
def test_a_browser_draws_a_figure():
    with store_notebooks.browser() as draw:
        picture = draw({"data": [{"type": "bar", "x": [1], "y": [2]}], "layout": {"width": 300, "height": 200}})
    assert picture.startswith(b"\x89PNG") and int.from_bytes(picture[16:20], "big") == 300


def report(folder, *cases):
    form = '<testcase classname="notebooks.{}" name="Cell {}">{}</testcase>'
    rows = "".join(form.format(*case) for case in cases)
    file = folder / "report.xml"
    file.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    return file


def test_a_report_with_every_cell_passes_and_one_with_a_cell_missing_or_skipped_fails(tmp_path):
    folder = tmp_path / "notebooks"
    write(folder, "00_a.ipynb", "1", "2")
    write(folder, "01_b.ipynb", "1")
    every = [("00_a.ipynb", 0, ""), ("00_a.ipynb", 1, ""), ("01_b.ipynb", 0, "<failure/>")]
    assert check_ran.missing(report(tmp_path, *every), folder) == []
    assert check_ran.missing(report(tmp_path, *every[1:]), folder) == ["00_a.ipynb: 1 of 2 cells were run"]
    skipped = [*every[:2], ("01_b.ipynb", 0, "<skipped/>")]
    assert check_ran.missing(report(tmp_path, *skipped), folder) == ["01_b.ipynb: 0 of 1 cells were run"]
    assert len(check_ran.missing(report(tmp_path), folder)) == 2


def test_a_missing_or_broken_report_fails(tmp_path, capsys):
    assert check_ran.main([str(tmp_path / "none.xml")]) == 1
    (tmp_path / "half.xml").write_text("<testsuites>")
    assert check_ran.main([str(tmp_path / "half.xml")]) == 1
    assert "not a pytest report" in capsys.readouterr().err


def test_execution_happens_in_the_folder_of_the_notebook(tmp_path):
    path = write(tmp_path / "notebooks", "00_a.ipynb", "import pathlib; print(pathlib.Path.cwd().name)")
    notebook = nbformat.read(path, 4)
    execute(notebook, path.parent)
    assert code_cells(notebook)[0].outputs[0].text == "notebooks\n"


def test_a_widget_runs_and_leaves_its_sentence_but_no_state(tmp_path):
    source = ("import ipywidgets\nfrom gptoss_lab.viz.explore import sliders\n"
              "sliders(lambda x: x + 1, 'A slider over x.', x=ipywidgets.IntSlider(value=1))")
    path = write(tmp_path / "notebooks", "00_a.ipynb", source)
    notebook = nbformat.read(path, 4)
    execute(notebook, path.parent)
    assert "widgets" not in notebook.metadata
    assert code_cells(notebook)[0].outputs[-1].data["text/plain"] == "A slider over x."
