"""The models that the multi-GPU benches time: one rank's share in the fast forward gives the logits of one rank."""
from dataclasses import replace

import pytest
import torch

from gptoss_lab.bench.rank_model import Made, RankSubject, centre_routers, fast_weights, plain_model
from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.model import load_model
from gptoss_lab.model.fast import fast_share
from gptoss_lab.parallel import Plan, ShardedSource, share_of, simulate

CONFIG = replace(preset("nano"), name="small", num_layers=2, vocab_size=1021, sliding_window=16, eos_token_ids=(2,),
                 pad_token_id=1)
IDS = torch.randint(0, 1021, (50,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rank_model") / "small"
    synth(CONFIG, path)
    return path


def fast(own, path, plan, experts):
    groups = own.plan_groups(plan)
    weights = fast_weights(RankSubject(CONFIG, plan, experts, path), groups, own.device, torch.float32)
    model = fast_share(weights, groups, tokens=200, sequences=2, graphs=False)
    caches = [model.new_cache(), model.new_cache()]
    first = model(IDS, [30, 20], caches)
    return torch.stack([first, model(IDS[:2], [1, 1], caches)]), weights.layers[0]


@pytest.mark.parametrize("plan", [Plan(), Plan(1, 1, 2), Plan(2, 1, 2), Plan(4, 1, 4), Plan(2, 1, 4),
                                  Plan(2, 1, 2, True), Plan(4, 1, 4, True)], ids=str)
def test_fast_forward_over_ranks(folder, plan):
    """Prefill and a decode step, heads and experts cut, against the plain model that nobody cut."""
    alone = load_model(folder, dtype=torch.float32)
    caches = [alone.new_cache(), alone.new_cache()]
    first = alone(IDS, [30, 20], caches)
    exact = torch.stack([first, alone(IDS[:2], [1, 1], caches)])
    for rank, (found, layer) in enumerate(simulate(plan.world, fast, folder, plan, "dense")):
        assert ((found - exact).abs().max() / exact.abs().max()).item() <= 1e-5
        share = share_of(CONFIG, plan, rank)
        assert layer.sinks.shape[0] == len(share.heads) and layer.moe.first_expert == share.experts.start
        assert layer.moe.gate_up.values.shape[:2] == (len(share.experts), 2 * len(share.expert_rows))


def test_weights_that_are_made_are_cut_like_those_on_disk():
    """`Made` stands for a checkpoint: every slice of it is the slice of the whole."""
    made = Made(CONFIG, torch.device("cpu"))
    for rank in range(4):
        share = share_of(CONFIG, Plan(2, 1, 4), rank)
        source = ShardedSource(made, share)
        whole = made.tensor("model.layers.1.mlp.experts.down_proj_blocks")
        at = slice(share.experts.start, share.experts.stop), slice(None), slice(
            share.expert_rows.start // 32, share.expert_rows.stop // 32)
        assert torch.equal(source.experts(1, "down_proj").blocks, whole[at])
        rows = slice(64 * share.heads.start, 64 * share.heads.stop)
        q = source.linear("model.layers.1.self_attn.q_proj", torch.device("cpu")).weight
        assert torch.equal(q, made.tensor("model.layers.1.self_attn.q_proj.weight")[rows])


@pytest.mark.parametrize(("plan", "fast"), [
    (Plan(2, 1, 2), True), (Plan(2, 2, 1), True), (Plan(1, 1, 2, True), True), (Plan(2, 2, 2, True), False)], ids=str)
def test_rows_say_which_forward_ran(plan, fast):
    subject = RankSubject(CONFIG, plan, "fp8", projections="fp8")
    assert subject.backend == ("fast, fp8 experts, fp8 projections" if fast else "plain, fp8 experts")
    assert subject.fast == fast and subject.conditions["sequence_split"] == plan.sequence_split
    assert subject.conditions["projections"] == ("fp8" if fast else "dense")


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(2, 1, 2, True), Plan(2, 2, 1)], ids=str)
def test_centred_routers_are_the_same_on_every_rank(plan):
    """And those of one rank: the mean is over all rows, also where each rank sees its part of them."""
    def own(ranks, plan=plan):
        groups = ranks.plan_groups(plan)
        weights = fast_weights(RankSubject(CONFIG, plan, "dense"), groups, ranks.device, torch.float32)
        centre_routers(weights, groups, 100)
        return torch.stack([layer.moe.router_bias for layer in weights.layers])

    exact = simulate(1, lambda ranks: own(ranks, Plan()))[0]
    found = simulate(2, own)
    assert torch.equal(found[0], found[1]) and bool(exact.abs().max() > 0.1)
    assert torch.allclose(found[0], exact, rtol=1e-4, atol=1e-4)


def test_plain_model_over_made_weights():
    def own(ranks):
        subject = RankSubject(CONFIG, Plan(2, 2, 1), "dense")
        model = plain_model(subject, ranks.plan_groups(subject.plan), ranks.device, torch.float32)
        return model(IDS[:7])

    found = simulate(2, own)
    assert torch.allclose(found[0], found[1], atol=1e-4) and bool(torch.isfinite(found[0]).all())
