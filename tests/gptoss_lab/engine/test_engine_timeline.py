"""The scheduler's record: what every request did in every step, worked out by hand."""
import pytest
import torch
from toy_models import SMALL, Table, random_table, small_model

from gptoss_lab.engine import Engine, Loop, SamplingParams, Timeline
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.decoders.speculative import SpeculativeDecoder
from gptoss_lab.engine.timeline import KINDS, Entry
from gptoss_lab.model.paged import PagePool


def greedy(length=5):
    return SamplingParams(temperature=0, max_new_tokens=length, stop_ids=())


def test_chunks_decode_waiting_and_the_end():
    """Steps of 4 tokens, a batch of two: a prompt of 6 and one of 2; a third waits for a row."""
    timeline = Timeline()
    target = Table(random_table(0))
    loop = Loop(Engine(target, PlainDecoder(target, 4)), max_batch=2, timeline=timeline)
    for sequence, length, new in ((5, 6, 2), (6, 2, 1), (7, 1, 1)):
        loop.submit(sequence, [1] * length, greedy(new))
    while not loop.idle:
        loop.step()
    assert timeline.of(5) == [Entry(5, "prefill", 4), Entry(5, "prefill", 2, 1), Entry(5, "decode", 1, 1, "length")]
    assert timeline.of(6) == [Entry(6, "idle"), Entry(6, "prefill", 2, 1, "length"), None]
    assert timeline.of(7) == [Entry(7, "waiting"), Entry(7, "waiting"), Entry(7, "prefill", 1, 1, "length")]
    assert timeline.sequences == [5, 6, 7] and timeline.steps[0].pages == 0
    assert [(step.read, step.found) for step in timeline.steps] == [(4, 0), (4, 2), (2, 2)]


def test_preemption_cancel_and_pages():
    model, timeline = small_model(), Timeline()
    pool = PagePool(SMALL, pages=9, rings=4, page_size=4, dtype=torch.float32, device="cpu")
    loop = Loop(Engine(model, PlainDecoder(model, pool=pool)), timeline=timeline)
    loop.submit(1, list(range(15)), greedy(8))
    loop.submit(2, list(range(5, 20)), greedy(8))
    loop.submit(3, [1, 2], greedy(3))
    loop.step()
    loop.cancel(3)
    while not loop.idle:
        loop.step()
    kinds = [[entry and entry.kind for entry in timeline.of(sequence)] for sequence in (1, 2, 3)]
    assert kinds[0][:9] == ["prefill"] + ["decode"] * 7 + [None]
    assert kinds[1][:9] == ["prefill", "decode", "preempted", *["waiting"] * 5, "prefill"]
    assert kinds[2][:3] == ["waiting", "cancelled", None]
    assert [step.pages_held for step in timeline.steps[:4]] == [8, 8, 5, 5]
    assert {step.pages for step in timeline.steps} == {8}
    back = timeline.of(2)[8]
    assert (back.read, back.found) == (17, 1)                   # the prompt and what it had found


def test_a_round_of_a_drafting_decoder_finds_several():
    timeline, table = Timeline(), random_table(0)
    target = Table(table)
    loop = Loop(Engine(target, SpeculativeDecoder(target, Table(table), 3)), timeline=timeline)
    loop.submit(1, [1, 2, 3], greedy(9))
    while not loop.idle:
        loop.step()
    assert [entry for entry in timeline.of(1)] == [
        Entry(1, "prefill", 3, 1), Entry(1, "decode", 4, 4), Entry(1, "decode", 4, 4, "length")]


def test_failures_are_noted():
    table = random_table(0)
    table[5] = torch.nan
    timeline = Timeline()
    loop = Loop(Engine(Table(table), PlainDecoder(Table(table))), timeline=timeline)
    loop.submit(1, [1, 5], greedy(2))
    loop.submit(2, [1, 2], greedy(1))
    while not loop.idle:
        loop.step()
    assert timeline.of(1) == [Entry(1, "idle", finish="failed"), None]
    assert timeline.of(2)[1] == Entry(2, "prefill", 2, 1, "length")


@pytest.mark.parametrize("seed", range(3))
def test_the_record_adds_up(seed):
    """Over random traffic: tokens found are those of the events, one entry a step each, pages within the pool."""
    model, timeline, g = small_model(), Timeline(), torch.Generator().manual_seed(seed)
    pool = PagePool(SMALL, pages=15, rings=4, page_size=4, dtype=torch.float32, device="cpu")
    loop, events = Loop(Engine(model, PlainDecoder(model, 8, pool)), timeline=timeline), []
    sizes = torch.randint(1, 14, (12, 2), generator=g).tolist()
    for sequence, (length, new) in enumerate(sizes):
        loop.submit(sequence, [sequence] * length, greedy(new))
        events += loop.step()
    while not loop.idle:
        events += loop.step()
    for sequence, (_, new) in enumerate(sizes):
        entries = [entry for entry in timeline.of(sequence) if entry is not None]
        assert sum(entry.found for entry in entries) == new == sum(e.sequence == sequence for e in events)
        assert [entry.finish for entry in entries if entry.finish] == ["length"]
        assert {entry.kind for entry in entries} <= set(KINDS)
    for step in timeline.steps:
        assert len({entry.sequence for entry in step.entries}) == len(step.entries)
        assert 0 <= step.pages_held <= step.pages == 14 and step.read <= 8
