"""The engine as one of several ranks: the tokens of one rank's engine, greedy and drawn, with log-probabilities."""
import pytest
import torch

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, LogitsError, SamplingParams
from gptoss_lab.engine.ranks import RankEngine, load_share, merged
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, RankError, simulate

GREEDY = SamplingParams(temperature=0, max_new_tokens=9)
SAMPLING = [
    GREEDY, SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=3, max_new_tokens=12),
    SamplingParams(temperature=0.7, seed=5, max_new_tokens=4, logprobs=True, top_logprobs=3),
    SamplingParams(temperature=0, max_new_tokens=1, logprobs=True),
]
PROMPTS = [[5, 6, 7] * 12, [1], [900, 3, 17, 4], [2, 2]]
PLANS = [Plan(1, 1, 2), Plan(2, 2, 1), Plan(4, 1, 4), Plan(2, 2, 2), Plan(1, 4, 1), Plan(2, 1, 4, True), Plan(8, 8, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from dataclasses import replace

    config = replace(preset("nano"), name="small", num_layers=3, vocab_size=1021, sliding_window=16,
                     eos_token_ids=(2,), pad_token_id=1)
    path = tmp_path_factory.mktemp("ranks") / "small"
    synth(config, path)
    return path


def own(ranks, path, plan, prompts, sampling, **options):
    model = load_share(path, ranks.plan_groups(plan), dtype=torch.float32, **options)
    return RankEngine(model, step_tokens=16).complete(prompts, sampling)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_tokens_of_one_rank(folder, plan):
    """Prompts in chunks of 16, groups that end at different steps; with DP8 half of the groups have no prompt."""
    expected = Engine(load_model(folder, dtype=torch.float32)).complete(PROMPTS, SAMPLING)
    found = merged(simulate(plan.world, own, folder, plan, PROMPTS, SAMPLING))
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert [p is None for p in one.logprobs] == [p is None for p in other.logprobs]
        assert [p for p in one.logprobs if p] == pytest.approx([p for p in other.logprobs if p], abs=1e-4)


def test_gathered_logits_give_the_same(folder):
    plan = Plan(2, 1, 2)
    def one(ranks, full):
        return own(ranks, folder, plan, PROMPTS, SAMPLING, full_logits=full)

    sharded, whole = (merged(simulate(2, one, full)) for full in (False, True))
    assert [c.tokens for c in sharded] == [c.tokens for c in whole]


def test_likeliest_tokens(folder):
    """top_logprobs from shards, beside those of whole logits."""
    params = SamplingParams(temperature=0, max_new_tokens=2, top_logprobs=5)
    engine = Engine(load_model(folder, dtype=torch.float32))
    expected = [event.top for event in engine.generate([PROMPTS[0]], params)]

    def tops(ranks):
        model = load_share(folder, ranks.plan_groups(Plan(1, 1, 4)), dtype=torch.float32)
        engine = RankEngine(model)
        request = engine._engine.request(0, PROMPTS[0], params)
        engine.decoder.start(request)
        found = []
        while len(found) < 2:
            new = engine.decoder.step([request])[0]
            found += [n.top for n in new]
            for n in new:
                request.take(n)
        return found

    for found in simulate(4, tops):
        for ours, theirs in zip(found, expected, strict=True):
            assert [t for t, _ in ours] == [t for t, _ in theirs]
            assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)


def test_sampling_without_a_seed_is_refused(folder):
    with pytest.raises(RankError, match="needs a seed"):
        simulate(2, own, folder, Plan(1, 1, 2), PROMPTS, SamplingParams())


def test_bad_logits_end_every_rank(folder):
    def broken(ranks):
        model = load_share(folder, ranks.plan_groups(Plan(1, 1, 2)), dtype=torch.float32)
        if ranks.rank == 1:
            model.unembedding.weight[3] = torch.nan
        with pytest.raises(LogitsError, match="sequence 0"):
            RankEngine(model).complete([[1, 2]], GREEDY)
        return True

    assert simulate(2, broken) == [True, True]


def test_ranks_that_disagree_are_named():
    from gptoss_lab.engine import Completion

    results = [{0: Completion((1, 2), (None, None), "length")}, {0: Completion((1, 3), (None, None), "length")}]
    with pytest.raises(ValueError, match="prompt 0: rank 1 has other tokens"):
        merged(results)
