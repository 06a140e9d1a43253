"""Prefill and decode on different ranks: the tokens of one engine, and no byte more than the rows that matter."""
from dataclasses import replace

import pytest
import torch

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.disaggregation import Disaggregated, transfers
from gptoss_lab.engine.disaggregation_routes import Pair, handover_bytes, page_runs
from gptoss_lab.engine.ranks import merged
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, RankError, share_of, simulate

CONFIG = replace(preset("nano"), name="small", num_layers=3, vocab_size=1021, sliding_window=16, eos_token_ids=(2,),
                 pad_token_id=1)
BIG = preset("gpt-oss-120b")
PROMPTS = [[5, 6, 7] * 13, [900, 3, 17, 4], [1], [8] * 16]
SAMPLING = [SamplingParams(temperature=0, max_new_tokens=8),
            SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3, max_new_tokens=12, logprobs=True),
            SamplingParams(temperature=0, max_new_tokens=1), SamplingParams(temperature=0.7, seed=5, max_new_tokens=6)]
PAIRS = [
    Pair(Plan(), Plan()), Pair(Plan(1, 1, 2), Plan()), Pair(Plan(), Plan(2, 1, 2)), Pair(Plan(2, 1, 4), Plan(1, 1, 2)),
    Pair(Plan(1, 1, 2, True), Plan(2, 2, 1)), Pair(Plan(2, 2, 2), Plan(1, 1, 4)), Pair(Plan(1, 1, 8), Plan(1, 4, 1)),
    Pair(Plan(1, 1, 4, True), Plan(4, 1, 4)),
]


def name(pair):
    return f"{pair.prefill} to {pair.decode}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("disaggregation") / "small"
    synth(CONFIG, path)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    return Engine(load_model(folder, dtype=torch.float32)).complete(PROMPTS, SAMPLING)


def own(ranks, path, pair, prompts, sampling, **options):
    engine = Disaggregated(ranks, path, pair, dtype=torch.float32, **{"chunk": 11, "page_size": 4} | options)
    return engine.complete(prompts, sampling), dict(engine.everyone.traffic.received), engine.engine.model.share


@pytest.mark.parametrize("pages", [None, 40])
@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_tokens_of_one_engine(folder, expected, pair, pages):
    """First and later tokens and log-probabilities; prompts in chunks of 11, pages of 4, growing and paged caches."""
    options = {} if pages is None else {"pages": pages}
    results = simulate(pair.world, lambda ranks: own(ranks, folder, pair, PROMPTS, SAMPLING, **options))
    assert all(not found for found, _, _ in results[: pair.prefill.world])
    found = merged([found for found, _, _ in results])
    assert [c.tokens for c in found] == [c.tokens for c in expected]
    assert [c.finish for c in found] == [c.finish for c in expected]
    assert found[1].logprobs == pytest.approx(expected[1].logprobs, abs=1e-4)


@pytest.mark.parametrize("pair", PAIRS, ids=name)
def test_bytes_that_move(folder, pair):
    """A decode rank receives the rows of its own heads once: all of the full layers, window - 1 of the sliding ones."""
    results = simulate(pair.world, own, folder, pair, PROMPTS, SAMPLING)
    for rank in range(pair.prefill.world, pair.world):
        received, share = results[rank][1:]
        plan, place = pair.decode, (rank - pair.prefill.world) // pair.decode.tp
        mine = PROMPTS[place :: plan.dp]
        whole = sum(handover_bytes(CONFIG, len(prompt), value_bytes=4) for prompt in mine)
        moved = received.get("pages", 0) + received.get("window", 0)
        assert moved * CONFIG.num_kv_heads == whole * len(share.kv_heads)


def test_bytes_of_the_real_model():
    """8192 tokens of the 120B: 18 full layers of 2048 bytes a token, 18 windows of 127 rows."""
    assert handover_bytes(BIG, 8192) == 18 * 2048 * (8192 + 127) == 306_671_616
    assert handover_bytes(BIG, 1) == 36 * 2048


@pytest.mark.parametrize("pair", PAIRS, ids=name)
@pytest.mark.parametrize("config", [CONFIG, BIG], ids=lambda c: c.name)
def test_every_head_arrives_once_from_a_rank_that_has_it(config, pair):
    for sequence in range(4):
        arrived = {}
        for route in pair.routes(config, sequence):
            sender = share_of(config, pair.prefill, route.sender)
            assert set(route.heads) <= set(sender.kv_heads)
            assert route.sender // pair.prefill.tp == sequence % pair.prefill.dp
            for head in route.heads:
                assert (route.receiver, head) not in arrived
                arrived[route.receiver, head] = route.sender
        first = pair.prefill.world + (sequence % pair.decode.dp) * pair.decode.tp
        needed = {(first + n, head) for n in range(pair.decode.tp)
                  for head in share_of(config, pair.decode, first + n - pair.prefill.world).kv_heads}
        assert set(arrived) == needed


def test_senders_share_the_load():
    """Ranks that split the tokens all have all heads: each sends its part, also to a single receiver."""
    for decode in (Plan(), Plan(1, 1, 2), Plan(1, 1, 4)):
        routes = Pair(Plan(1, 1, 4, True), decode).routes(BIG, 0)
        heads = {rank: sum(len(r.heads) for r in routes if r.sender == rank) for rank in range(4)}
        assert set(heads.values()) == {2}


def test_runs_of_pages():
    assert page_runs(39, 11, 4) == [(11, 0, 8), (22, 8, 20), (33, 20, 32), (39, 32, 39)]
    assert page_runs(8, 100, 64) == [(8, 0, 8)]
    assert page_runs(12, 3, 8) == [(9, 0, 8), (12, 8, 12)]
    for length, chunk, page in ((100, 7, 16), (64, 64, 64), (65, 64, 64)):
        rows = [row for _, start, stop in page_runs(length, chunk, page) for row in range(start, stop)]
        assert rows == list(range(length))
    with pytest.raises(ValueError, match="each must be at least 1"):
        page_runs(0, 1, 1)


def test_the_window_alone_travels():
    pieces = transfers(CONFIG, 100, 40, 8)
    assert [(what, layer, stop - start) for what, layer, start, stop in pieces if what == "window"] == [
        ("window", 0, 15), ("window", 2, 15)]
    assert {layer for what, layer, _, _ in pieces if what == "pages"} == {1}
    one_wide = replace(CONFIG, sliding_window=1)
    assert not [what for what, *_ in transfers(one_wide, 100, 40, 8) if what == "window"]


def test_pages_leave_before_the_prompt_is_read(folder):
    """The first pages of a long prompt are sent after its first chunk, not at its end."""
    def reading(ranks):
        engine = Disaggregated(ranks, folder, Pair(Plan(), Plan()), dtype=torch.float32, chunk=10, page_size=4)
        if not engine.reads:
            return engine.complete([[3] * 35], SAMPLING[0])
        log, send, step = [], engine.everyone.send, engine.engine.decoder.step
        engine.everyone.send = lambda x, to, what: log.append(what) or send(x, to, what)
        engine.engine.decoder.step = lambda batch: log.append("step") or step(batch)
        engine.complete([[3] * 35], SAMPLING[0])
        return log

    log = simulate(2, reading)[0]
    assert log == ["step", "pages"] * 4 + ["window"] * 2 + ["first token"]


def test_likeliest_tokens_are_refused(folder):
    with pytest.raises(RankError, match="top_logprobs is set"):
        simulate(2, own, folder, Pair(Plan(), Plan()), PROMPTS[:1], SamplingParams(temperature=0, top_logprobs=2))


def test_wrong_number_of_ranks(folder):
    with pytest.raises(RankError, match="EP1 DP1 TP2 needs 2 ranks from rank 1 on; there are 2 in all"):
        simulate(2, own, folder, Pair(Plan(), Plan(1, 1, 2)), PROMPTS[:1], SAMPLING[0])
