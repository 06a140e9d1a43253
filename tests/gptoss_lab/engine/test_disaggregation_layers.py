"""A prompt handed over layer by layer between fast models: one engine's logits, each layer sent when it is there."""
from dataclasses import replace

import pytest
import torch

from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.config import preset
from gptoss_lab.engine.disaggregation_layers import LayerSender, receive_layers
from gptoss_lab.engine.disaggregation_routes import Pair, handover_bytes
from gptoss_lab.model import load_model
from gptoss_lab.model.fast import fast_share, lay_out_share
from gptoss_lab.model.paged import CacheFull
from gptoss_lab.parallel import Plan, RankError, simulate

CONFIG = replace(preset("nano"), name="small", num_layers=3, vocab_size=1021, sliding_window=16, eos_token_ids=(2,),
                 pad_token_id=1)
PROMPT = torch.randint(0, 1021, (75,), generator=torch.Generator().manual_seed(0))
PAIRS = [Pair(Plan(), Plan()), Pair(Plan(1, 1, 2), Plan()), Pair(Plan(), Plan(2, 1, 2)),
         Pair(Plan(2, 1, 2, True), Plan(2, 1, 2))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "small"
    synth(CONFIG, path)
    return path


def half(ranks, path, pair, log=None, tokens=200, kv_form="same", length=75):
    """One rank: reads the prompt and hands it over, or takes it and decodes three tokens. Logits of both sides."""
    everyone = ranks.group(range(pair.world))
    prefill, decode = (ranks.plan_groups(plan, first) for plan, first in ((pair.prefill, 0),
                                                                        (pair.decode, pair.prefill.world)))
    groups, prompt = prefill or decode, PROMPT[:length]
    share = groups.share(CONFIG)
    weights = lay_out_share(open_checkpoint(path), share, "cpu", torch.float32, experts="dense")
    model = fast_share(weights, groups, tokens=tokens, sequences=1, page_size=4, kv_form=kv_form)
    if kv_form == "fp8":
        model.pool.key_scales.fill_(0.02)
        model.pool.value_scales.fill_(0.01)
    cache, routes = model.new_cache(), pair.routes(CONFIG, 0)
    if prefill is not None:
        own = [route for route in routes if route.sender == ranks.rank]
        if log is not None:
            send = everyone.send
            everyone.send = lambda x, to, what: log.append(what) or send(x, to, what)
        sender = LayerSender(everyone, own, cache, length, share.kv_heads.start)

        def observe(what, layer, x):
            if log is not None:
                log.append(f"attention {layer}")
            sender(what, layer, x)

        first = model(prompt, [length], [cache], observe=observe)
        if log is not None:
            log.append("head")
        sender.finish()
        return [first] + [model(torch.tensor([n]), [1], [cache]) for n in range(3)]
    receive_layers(everyone, [r for r in routes if r.receiver == ranks.rank], cache, length, share.kv_heads.start)
    rows = [model(torch.tensor([n]), [1], [cache]) for n in range(3)]
    return rows, everyone.traffic.received


@pytest.mark.parametrize("length", [75, 15, 1])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.prefill} to {pair.decode}")
def test_decode_goes_on_as_one_engine_would(folder, pair, length):
    plain = load_model(folder, dtype=torch.float32)
    exact = plain(torch.cat([PROMPT[:length], torch.arange(3)]), logits="all")[length:]
    results = simulate(pair.world, lambda ranks: half(ranks, folder, pair, length=length))
    for rows, received in results[pair.prefill.world :]:
        assert ((torch.cat(rows) - exact).abs().max() / exact.abs().max()).item() <= 1e-5
        moved = sum(received[f"layer {n}"] for n in range(3))
        assert moved * pair.decode.tp == handover_bytes(CONFIG, length, value_bytes=4)


def test_e4m3_pages_travel_as_they_are(folder):
    """Half of bf16's bytes, a quarter of fp32's; the decode rank's logits are bit for bit the prefill rank's."""
    reader, (rows, received) = simulate(2, lambda ranks: half(ranks, folder, PAIRS[0], kv_form="fp8"))
    for ours, theirs in zip(rows, reader[1:], strict=True):
        assert torch.equal(ours, theirs)
    assert sum(received[f"layer {n}"] for n in range(3)) == handover_bytes(CONFIG, 75, value_bytes=1)


def test_each_layer_leaves_before_the_next_is_computed(folder):
    log = []
    simulate(2, lambda ranks: half(ranks, folder, PAIRS[0], log if ranks.rank == 0 else None))
    assert log == [step for n in range(3) for step in (f"attention {n}", f"layer {n}")] + ["head"]


def test_a_pool_that_is_too_small_says_so(folder):
    with pytest.raises(RankError, match="more pages") as error:
        simulate(2, lambda ranks: half(ranks, folder, PAIRS[0], tokens=200 if ranks.rank == 0 else 40))
    assert isinstance(error.value.__cause__, CacheFull)
