"""The noted figures: read as written, never a result row, each kernel a line with the amounts of one layer."""
import pytest

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.cost import H200_MEASURED, CostError, decode_bound, prefill_bound
from gptoss_lab.cost.figures import figures_path, kernel_equation, read_figures

FIGURES = read_figures()
BIG = preset("gpt-oss-120b")


def test_every_figure_says_that_its_readings_were_not_kept():
    assert len(FIGURES) == 61
    assert all(f.source.endswith("raw readings not kept") and f.value > 0 for f in FIGURES)


def test_no_figure_stands_among_the_measured_rows():
    commands = {row["command"] for row in results.read_rows(results.recorded_folder())}
    assert not any("figures" in command for command in commands)
    assert all(row["raw"] for row in results.read_rows(results.recorded_folder()) if row["value"] is not None)


def test_the_link_of_the_measured_hardware_is_the_noted_copy():
    [copy] = read_figures(quantity="peer_copy")
    assert H200_MEASURED.link_bytes_per_second == copy.value * 1e9
    source = H200_MEASURED.sources["link_bytes_per_second"]
    assert source.mark == "published" and "raw readings not kept" in source.text and "figures.csv" in source.text


def test_a_kernel_is_one_layer_of_the_bound():
    [full] = read_figures(quantity="prefill_attention_full", tokens=8192)
    line = kernel_equation(full)
    limit = prefill_bound(BIG, 8192)
    assert line.amounts["attention_full"] == pytest.approx(limit["attention_full"].seconds / 18)
    assert line.seconds == pytest.approx(1.142e-3) and line.origin == "published"
    [gate_up] = read_figures(quantity="prefill_experts_gate_up", tokens=8192, model=BIG.name)
    line = kernel_equation(gate_up)
    assert line.amounts["experts_fp8"] == pytest.approx(limit["experts_gate_up"].compute_seconds / 36)
    assert line.amounts["expert_weights_fp8"] == pytest.approx(limit["experts_gate_up"].memory_seconds / 36, rel=2e-3)


def test_a_rate_becomes_the_time_of_the_bytes_that_are_touched():
    [figure] = read_figures(quantity="decode_experts_down", batch=32)
    limit = decode_bound(BIG, 1, 32)["experts_down"]
    seconds = limit.part.weight_bytes / 36 / 3467e9
    assert kernel_equation(figure).seconds == pytest.approx(seconds, rel=2e-3)
    with pytest.raises(CostError, match="is a rate in GB/s"):
        _ = figure.seconds


def test_an_all_reduce_by_hand_and_what_is_no_kernel():
    """NCCL's stands for the gathers of a library, the other one for sums."""
    library, summed = (kernel_equation(figure) for figure in read_figures(quantity="all_reduce", tokens=1024))
    assert library.amounts == {"link_gathers": pytest.approx(1024 * 5760 / 450e9), "gathers": 1.0}
    assert summed.amounts == {"link": pytest.approx(1024 * 5760 / 450e9), "collectives": 1.0}
    assert (library.seconds, summed.seconds) == (pytest.approx(41e-6), pytest.approx(25e-6))
    for quantity in ("peer_copy", "prefill", "decode"):
        assert all(kernel_equation(f) is None for f in read_figures(quantity=quantity))


@pytest.mark.parametrize(("old", "new", "message"), [
    ("quantity,kernel", "what,kernel", "columns"), (",1.142,", ",fast,", "line 2: could not convert"),
    ("gpt-oss-120b,8192,1,1,1.142", "gpt-oss-7b,8192,1,1,1.142", "line 2: no preset"),
])
def test_a_broken_file_is_named(tmp_path, old, new, message):
    file = tmp_path / "figures.csv"
    file.write_text(figures_path().read_text().replace(old, new, 1))
    with pytest.raises(CostError, match=message):
        read_figures(file)
    with pytest.raises(CostError, match="cannot read the figures none.csv"):
        read_figures(tmp_path / "none.csv")
