"""The models that the multi-GPU benches time: one rank's share in the fast forward gives the logits of one rank."""
from dataclasses import replace

import pytest
import torch

from gptoss_lab.bench.rank_model import Made, RankSubject, fast_model, fast_weights, plain_model
from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.model import load_model
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
    model = fast_model(weights, CONFIG, groups, tokens=200, sequences=2, graphs=False)
    caches = [model.new_cache(), model.new_cache()]
    first = model(IDS, [30, 20], caches)
    return torch.stack([first, model(IDS[:2], [1, 1], caches)]), weights.layers[0]


@pytest.mark.parametrize("plan", [Plan(), Plan(1, 1, 2), Plan(2, 1, 2), Plan(4, 1, 4), Plan(2, 1, 4)], ids=str)
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


@pytest.mark.parametrize(("plan", "kind"), [
    (Plan(2, 1, 2), "fast"), (Plan(2, 2, 1), "plain"), (Plan(1, 1, 2, True), "plain")])
def test_rows_say_which_forward_ran(plan, kind):
    subject = RankSubject(CONFIG, plan, "fp8")
    assert subject.backend == f"{kind}, fp8 experts" and subject.fast == (kind == "fast")
    assert subject.conditions["sequence_split"] == plan.sequence_split


def test_plain_model_over_made_weights():
    def own(ranks):
        subject = RankSubject(CONFIG, Plan(2, 2, 1), "dense")
        model = plain_model(subject, ranks.plan_groups(subject.plan), ranks.device, torch.float32)
        return model(IDS[:7])

    found = simulate(2, own)
    assert torch.allclose(found[0], found[1], atol=1e-4) and bool(torch.isfinite(found[0]).all())
