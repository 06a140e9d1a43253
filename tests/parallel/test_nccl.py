"""Two GPUs over NCCL: the tokens of one GPU by the plain forward, the logits of one GPU by the fast one with its sums
in one kernel and its decode steps captured, and a prompt handed from one GPU to the other."""
import pytest
import rank_work
import torch

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.disaggregation_routes import Pair
from gptoss_lab.engine.ranks import merged
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA GPUs, there are {torch.cuda.device_count()}")]
PROMPTS = [[5, 6, 7] * 60, [1], [900, 3, 17, 4]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def two():
    with Ranks(2, "nccl", timeout=60) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def expected():
    model = load_model(ensure_nano(), "cuda", torch.float32)
    return [c.tokens for c in Engine(model).complete(PROMPTS, GREEDY)]


@pytest.mark.parametrize("plan", [Plan(1, 1, 2), Plan(2, 1, 2), Plan(1, 2, 1), Plan(2, 2, 1), Plan(2, 1, 2, True)],
                         ids=str)
def test_tokens(two, expected, plan):
    assert [c.tokens for c in merged(two.run(rank_work.complete, ensure_nano(), plan, PROMPTS, GREEDY))] == expected


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(1, 1, 2), Plan(2, 1, 2, True), Plan(2, 2, 1)], ids=str)
def test_logits_of_the_fast_forward(two, plan):
    """bf16 with e4m3 experts against the plain fp32 model of the same checkpoint, by what bf16 and e4m3 round."""
    model = load_model(ensure_nano(), "cuda", torch.float32)
    caches = [model.new_cache()]
    ids = [torch.arange(200), *(torch.tensor([n]) for n in range(6))]
    exact = torch.cat([model(part.cuda(), [len(part)], caches) for part in ids]).cpu()
    for error, reason in two.run(rank_work.fast_error, ensure_nano(), plan, exact):
        assert error <= 0.08
        assert ("one kernel up to the 256 rows" in reason) == (plan.tp > 1)


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(1, 1, 2)], ids=str)
def test_prompts_whose_rows_are_cut_between_the_ranks(two, plan):
    """The same arithmetic in another order: a few codes of e4m3 differ, and what they do to a bf16 stream."""
    for error, same, taken in two.run(rank_work.own_rows_error, plan, 4):
        assert error <= 0.02 and same
        assert taken == [1499, 1501]


def test_prefill_on_one_and_decode_on_the_other(two, expected):
    found = two.run(rank_work.hand_over, ensure_nano(), Pair(Plan(), Plan()), PROMPTS, GREEDY)
    assert [c.tokens for c in merged(found)] == expected
