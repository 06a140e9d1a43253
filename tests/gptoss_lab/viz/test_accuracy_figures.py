"""Figure and tables of the accuracy study: exactly the rows' numbers, the baseline's line, and no row said plainly."""
import pytest

from gptoss_lab.results import make_row
from gptoss_lab.train.evaluate import share
from gptoss_lab.train.study.names import BASELINE, CONTROL, EXACT, EXPERTS, FAR, KL, LOSS, SAME
from gptoss_lab.train.study.numbers import mcnemar, paired_difference
from gptoss_lab.viz import accuracy

SHARED = {"model": "nano", "checkpoint": "abc", "device": "cpu", "seed": 0}


def rows_of(name, right, gained=0, lost=0, kl=None, same=1.0, loss=0.01):
    found = share(right, 1000)
    paired = {}
    if name != BASELINE:
        change = paired_difference(gained, lost, 1000)
        paired = {"p": mcnemar(gained, lost), "difference": change.value, "difference_low": change.low,
                  "difference_high": change.high}
    peer = None if name == BASELINE else (BASELINE, 0.97)

    def one(case, metric, value, **conditions):
        return make_row("accuracy", case, name, metric, [value], "u", statistic="single", peer=peer, **SHARED,
                        **conditions)

    rows = [one(EXACT, "accuracy", found["share"], **{k: found[k] for k in ("count", "low", "high")}, **paired),
            one(LOSS, "kl", loss, low=loss - 0.001, high=loss + 0.001, perplexity=2.718281828**loss)]
    if kl is not None:
        rows += [one(KL, "kl", kl, low=kl / 2, high=2 * kl), one(SAME, "accuracy", same, low=same, high=same),
                 one(EXPERTS, "accuracy", 0.995)]
    return rows


@pytest.fixture
def rows():
    return [*rows_of("sinks ignored", 700, 10, 280, 0.5, 0.4), *rows_of(BASELINE, 970),
            *rows_of("FP8 exact", 970, kl=0.0), *rows_of("KV in FP8", 968, 3, 5, 1e-4, 0.98)]


def test_dots_are_the_rows_numbers(rows):
    found = {name: rest for name, *rest in accuracy.dots(rows, EXACT)}
    assert found["sinks ignored"] == pytest.approx([70.0, 67.08, 72.76], abs=0.01)
    assert list(found) == ["sinks ignored", BASELINE, "FP8 exact", "KV in FP8"]
    assert accuracy.dots(rows, KL)[0] == ("sinks ignored", 0.5, 0.25, 1.0)
    assert accuracy.dots(rows, FAR) == []


def test_the_figure_has_every_variant_its_interval_and_the_baseline(rows):
    fig = accuracy.dots_figure(rows)
    by_name = {trace.y[0]: trace for trace in fig.data}
    assert set(by_name) == {"sinks ignored", BASELINE, "FP8 exact", "KV in FP8"}
    mark = by_name["sinks ignored"]
    assert mark.x[0] == pytest.approx(70.0) and mark.x[0] + mark.error_x.array[0] == pytest.approx(72.76, abs=0.01)
    assert mark.x[0] - mark.error_x.arrayminus[0] == pytest.approx(67.08, abs=0.01)
    line, band = fig.layout.shapes
    assert line.x0 == line.x1 == pytest.approx(97.0) and band.x0 < 97.0 < band.x1
    assert fig.layout.title.text == "97.0% right; 1 of 3 variants change the answers"
    assert "recorded · nano, weights abc; 1,000 held-out problems" in fig.layout.title.subtitle.text


def test_a_few_variants_are_drawn_and_judged_among_all(rows):
    """p = 0.03 would be significant alone, not beside so many; the control is no variant."""
    more = [row for n in range(3) for row in rows_of(f"other {n}", 968, 3, 5, 1e-4, 0.98)]
    near = rows_of("near", 960, 4, 14, 0.1, 0.9)
    assert 0.05 / 7 < near[0]["conditions"]["p"] < 0.05
    fig = accuracy.dots_figure([*rows, *more, *near, *rows_of(CONTROL, 970, kl=0.0)],
                               variants=["near", "sinks ignored"])
    assert {trace.y[0] for trace in fig.data} == {"near", "sinks ignored", BASELINE, CONTROL}
    assert fig.layout.title.text == "97.0% right; 1 of 2 variants change the answers"


def test_a_divergence_of_0_is_marked_at_the_edge(rows):
    fig = accuracy.dots_figure(rows, KL)
    by_name = {trace.y[0]: trace for trace in fig.data}
    zero, small = by_name["FP8 exact"], by_name["KV in FP8"]
    assert fig.layout.xaxis.type == "log" and zero.marker.symbol == "triangle-left-open"
    assert zero.x[0] == pytest.approx(1e-4 / 3) and small.x[0] == 1e-4 and "FP8 exact: 0 (" in zero.hovertemplate
    assert fig.layout.title.text == "1 of 3 variants leave every probability as it is"


@pytest.mark.parametrize("case", list(accuracy.MEASURES))
def test_without_rows_it_says_so(case):
    fig = accuracy.dots_figure([], case)
    assert fig.layout.annotations[0].text == "not recorded yet" and "not recorded yet" in fig.layout.title.text
    assert not fig.data


def test_tables_without_rows_say_so():
    assert accuracy.accuracy_table([]).frame.iloc[0, 0] == "not recorded yet"
    shown = accuracy.verdict_table([]).frame
    assert set(shown["shows"]) == {"open"} and set(shown["how"]) == {"not measured yet."}
    assert accuracy.source([]) == "no baseline"


def test_the_table_has_the_baseline_first_and_every_number(rows):
    shown = accuracy.accuracy_table(rows, "live").frame
    assert list(shown["variant"]) == [BASELINE, "sinks ignored", "FP8 exact", "KV in FP8"]
    first, sinks = shown.iloc[0], shown.iloc[1]
    assert first["p"] == first["KL, nats"] == "" and first["right, %"] == "97.00"
    assert sinks["against baseline, points"].startswith("-27.00 (-29.") and sinks["KL, nats"] == "0.5"
    assert sinks["same tokens, %"] == "40.00" and sinks["perplexity"] == "1.0101" and sinks["origin"] == "live"


def test_verdicts_come_from_the_same_rows(rows):
    shown = accuracy.verdict_table(rows).frame.set_index("claim")["shows"]
    assert shown["Every head has a sink in its softmax"] == "yes" and "open" in set(shown)


def test_failed_rows_are_no_dots(rows):
    failed = make_row("accuracy", EXACT, "broken", "accuracy", [], "share", failed="no memory", **SHARED)
    assert "broken" not in {name for name, *_ in accuracy.dots([*rows, failed], EXACT)}


def test_an_unknown_measure_is_refused(rows):
    with pytest.raises(ValueError, match="no measure is called 'speed'; there are exact match"):
        accuracy.dots_figure(rows, "speed")


def test_only_some_variants_keep_what_they_are_judged_by(rows):
    kept = accuracy.only([*rows, *rows_of(CONTROL, 970, kl=0.0)], "KV in FP8")
    assert {row["backend"] for row in kept} == {BASELINE, CONTROL, "KV in FP8"}


def test_effects_say_what_changes_and_what_is_not_recorded(rows):
    shown = accuracy.effects_table(rows, "FP8 exact", "sinks ignored", "YaRN rounded").frame
    assert shown["changes"].tolist() == ["nothing", "the answers", accuracy.NONE_YET]
    assert "KL 0.5 nats" in shown["how"][1]


def test_verdicts_of_some_variants_alone(rows):
    shown = accuracy.verdict_table(rows, "sinks ignored").frame
    assert shown["claim"].tolist() == ["Every head has a sink in its softmax"] and shown["shows"].tolist() == ["yes"]
