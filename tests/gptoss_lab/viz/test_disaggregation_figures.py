"""Numbers behind the figures of disaggregation: bytes and times by hand, two real processes, claims of notebook 10."""
import math

import pytest

from gptoss_lab.config import preset
from gptoss_lab.cost import SERVED, prefill_bound
from gptoss_lab.cost.performance import calibrate, kernels_alone
from gptoss_lab.cost.pools import Goals, Traffic
from gptoss_lab.engine.disaggregation_routes import handover_bytes
from gptoss_lab.results import read_rows, recorded_folder
from gptoss_lab.viz import disaggregation_forms as forms
from gptoss_lab.viz import disaggregation_live as live
from gptoss_lab.viz import disaggregation_pages as pages
from gptoss_lab.viz import disaggregation_pools as pools
from gptoss_lab.viz import disaggregation_schedule as schedule
from gptoss_lab.viz import parallel_live

SMALL, BIG = preset("gpt-oss-20b"), preset("gpt-oss-120b")
GOALS = Goals(first_token_seconds=1.0, seconds_per_token=0.020)


# -- pages -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 64, 127, 128, 8192, 131072])
@pytest.mark.parametrize("config", [SMALL, BIG], ids=lambda c: c.name)
def test_pages_hold_the_bytes_of_the_hand_over(config, length):
    layers = pages.layer_pages(config, length)
    assert sum(one.size for one in layers) == handover_bytes(config, length)
    assert [one.start for one in layers] == [sum(o.size for o in layers[:n]) for n in range(len(layers))]
    assert all(one.pages == math.ceil((min(length, 127) if config.is_sliding(one.layer) else length) / 64)
               for one in layers)


def test_a_page_for_every_square():
    owners = pages.page_owners(BIG, 8192)
    fig = pages.figure(BIG, 8192)
    assert len(owners) == 18 * 128 + 18 * 2 == sum(len(line) for line in fig.data[0].customdata)
    assert [z for line in fig.data[0].z for z in line if z is not None].count(0) == 36
    assert list(fig.layout.yaxis.ticktext)[-1] == "1.23" and list(fig.layout.yaxis2.ticktext)[-1] == "0.82"
    assert "306.7 MB" in fig.layout.title.text
    frame = pages.bytes_table(BIG, 8192).frame
    assert frame["bytes"].tolist() == ["301,989,888", "4,681,728", "306,671,616"]
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        pages.layer_pages(BIG, 0)


# -- schedule ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [512, 8192, 65536])
def test_the_prefill_adds_up_to_its_bound(length):
    computed = schedule.compute(BIG, length)
    assert len(computed) == 38 and computed[0].layer == -1 and computed[-1].layer == 36
    assert computed[-1].stop == pytest.approx(prefill_bound(BIG, length, precision=SERVED).sequential_seconds, rel=1e-9)
    full, sliding = computed[2].stop - computed[2].start, computed[1].stop - computed[1].start
    assert full > sliding


@pytest.mark.parametrize("rate", [1, 5, 20, 50, 250])
def test_the_link_sends_in_turn_and_nothing_early(rate):
    found = schedule.by_layer(BIG, 8192, rate)
    ready = {piece.layer: piece.stop for piece in found.computed}
    assert [piece.layer for piece in found.sent] == list(range(36))
    assert all(piece.start >= ready[piece.layer] for piece in found.sent)
    assert all(b.start >= a.stop for a, b in zip(found.sent[:-1], found.sent[1:], strict=True))
    assert found.link_busy == pytest.approx(306_671_616 / (1e9 * rate))


def test_what_sticks_out_is_the_last_layer_less_the_head():
    head = prefill_bound(BIG, 8192, precision=SERVED)["head"].seconds
    assert schedule.by_layer(BIG, 8192, 250).sticks_out == 0
    assert schedule.by_layer(BIG, 8192, 50).sticks_out == pytest.approx(8192 * 2048 / 50e9 - head)
    assert schedule.slowest_link(BIG, 8192) == pytest.approx(8192 * 2048 / head / 1e9, rel=2e-3)
    slow = schedule.by_layer(BIG, 8192, 1)                       # the link is the limit: it never rests
    first = slow.computed[1].stop
    assert slow.sent[-1].stop == pytest.approx(first + 306_671_616 / 1e9, rel=0.01)


def test_chunks_read_the_weights_again():
    whole, halves = (schedule.by_chunk(BIG, 8192, 250, chunk) for chunk in (8192, 4096))
    assert whole.sticks_out == pytest.approx(306_671_616 / 250e9)
    assert halves.sticks_out == pytest.approx((150_994_944 + 4_681_728) / 250e9)
    assert whole.link_busy == pytest.approx(halves.link_busy)
    assert halves.prefill - whole.prefill > 0.015
    frame = schedule.ways_table(BIG, 8192).frame
    together = [float(x) for x in frame["together at 250 GB/s, ms"]]
    assert min(together) == together[-1] and frame["sent"].tolist()[-1] == "layer by layer"


def test_the_schedule_is_drawn_twice():
    fig = schedule.figure(SMALL, 2048, 4)
    found = schedule.by_layer(SMALL, 2048, 4)
    above = [bar for bar in fig.data if bar.xaxis == "x" and bar.base is not None]
    assert [len(bar.x) for bar in above] == [26, 24]
    assert above[1].base[3] == 1e3 * found.sent[3].start and above[1].x[3] == pytest.approx(
        1e3 * (found.sent[3].stop - found.sent[3].start))
    assert found.sticks_out > 1e-4 and f"{1e3 * found.sticks_out:.2f} ms stick out" in fig.layout.title.text


# -- forms -------------------------------------------------------------------------------------------------------------
def test_each_side_has_its_form():
    found = forms.sides(BIG)
    assert found["FP8"][0] < found["packed MXFP4"][0] and found["packed MXFP4"][1] < found["FP8"][1]
    frame = forms.forms_table(BIG).frame
    touched = 128 * (1 - (124 / 128) ** 32)
    packed = 3 * 2880 * 2880 // 32 * 17 + 2 * 3 * 2880                          # one expert: 17 bytes for 32 values
    assert frame.iloc[1, 1] == f"{36 * touched * packed / 1e9:.1f}" == "38.9" and frame.iloc[0, 1] == "73.2"
    assert list(forms.figure(BIG).data[0].y)[0] == 1


# -- pools -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def kernels():
    return kernels_alone(read_rows(recorded_folder()))


@pytest.mark.parametrize(("step", "prefill", "batch", "tokens"), [(0.01, 0.1, 4, 64), (0.02, 0.5, 16, 200)])
def test_a_shared_replica_replayed(step, prefill, batch, tokens):
    """Step by step: whoever has ended is replaced, and its prompt is read while everyone waits."""
    left, now, done = [(n * (tokens - 1)) // batch + 1 for n in range(batch)], 0.0, 0
    for _ in range(50 * tokens):
        now += step
        for n in range(batch):
            left[n] -= 1
            if left[n] == 0:
                now, left[n], done = now + prefill, tokens - 1, done + 1
    assert done / now == pytest.approx(pools.capacity(step, prefill, batch, tokens), rel=0.02)
    each = pools.seconds_per_token(step, prefill, batch, tokens)
    assert now / (50 * tokens) == pytest.approx(each, rel=0.02)


def test_the_shared_pool_meets_its_goals_and_carries_the_traffic(kernels):
    for given, wanted in pools.MIXES.values():
        found = pools.size_shared(kernels, BIG, Traffic(20, given, wanted), GOALS)
        assert found.seconds_per_token <= 0.020 and found.pause_seconds <= 1.0
        step = found.seconds_per_token - found.batch * found.pause_seconds / (wanted - 1)
        able = found.replicas * pools.capacity(step, found.pause_seconds, found.batch, wanted)
        assert 0.8 * able * (1 + 1e-9) >= 20
        assert found.replicas == 1 or 0.8 * able * (found.replicas - 1) / found.replicas < 20


def test_goals_out_of_reach(kernels):
    goals = Goals(first_token_seconds=1.0, seconds_per_token=0.003)
    with pytest.raises(pools.CostError, match="no plan and batch gives a token every 0.003 s"):
        pools.size_shared(kernels, BIG, Traffic(2, 131_000, 64), goals)


def test_what_the_notebook_says_of_splitting():
    """With traffic the split is cheaper for every mix but the last, which costs the same; with little it never is."""
    engine = calibrate(read_rows(recorded_folder()))
    much, little = (pools.sized(engine, BIG, rate, GOALS, precision=SERVED) for rate in (200, 2))
    assert all(both.split.usd_per_day < both.shared.usd_per_day for both in much[:-1])
    assert much[-1].split.usd_per_day == much[-1].shared.usd_per_day
    assert all(both.split.usd_per_day >= both.shared.usd_per_day for both in little)
    assert 0 < pools.saved(much) < 0.5 and pools.saved(little) < 0 and pools.saved([]) == 0
    fig = pools.figure(much, "this engine")
    assert [a + b for a, b in zip(fig.data[0].y, fig.data[1].y, strict=True)] == [
        both.split.prefill.gpus + both.split.decode.gpus for both in much]
    missed = [pools.Both(much[0].name, much[0].split, None)]
    assert "none meets the goals" in pools.mixes_table(missed).frame.iloc[0].tolist()
    assert pools.figure(missed, "x").data[2].text[0] == "goals missed"


# -- two processes -----------------------------------------------------------------------------------------------------
def test_two_processes_write_what_one_engine_writes():
    lengths = (33, 5)
    path, prompts = parallel_live.small_checkpoint(), parallel_live.prompts(lengths)
    expected = live.alone(path, prompts)
    whole, no_window, no_pages = live.hand_over(path, prompts, ("", "window", "pages"))
    assert whole.tokens == expected
    assert no_window.tokens != expected and no_pages.tokens != expected
    assert whole.size == live.wanted_bytes(lengths) == 4 * 2 * live.small_config().kv_size * (33 + 5 + 2 * (15 + 5))
    assert [one.what for one in whole.arrived].count("first token") == 2
    frame = live.arrivals_table(whole, lengths).frame
    assert frame["rows"].tolist()[:2] == ["38", "40"] and frame["origin"].tolist() == ["live"] * 3 + ["modelled"]
