"""Which proposals stand: the published example, and the distribution by enumerating every case."""
import itertools
import math
from fractions import Fraction

import pytest
import torch

from gptoss_lab.engine import LogitsError, SamplingParams
from gptoss_lab.engine.decoders.acceptance import Acceptance
from gptoss_lab.engine.decoders.verify import Proposal, accept_greedy, accept_sampled, extend, verify
from gptoss_lab.engine.request import Request

TARGET = [0.30, 0.50, 0.10, 0.10]
PARTS = 20


def request(tokens, **params):
    return Request(3, list(tokens), SamplingParams(**{"seed": 1, **params}).seeded(), frozenset(), 100)


def rows(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_greedy_takes_the_argmax_where_a_ratio_would_accept():
    """The draft proposes 0 with probability .20 where the model has .30: a ratio would always accept it."""
    found = verify([request([7], temperature=0)], [Proposal([0], [])], rows(TARGET, TARGET))
    assert [[new.token for new in own] for own in found] == [[1]]
    q = torch.tensor([0.20, 0.40, 0.20, 0.20], dtype=torch.float64)
    p = torch.tensor(TARGET, dtype=torch.float64)
    assert accept_sampled(torch.stack([p, p]), [0], [q], [(0, 0.999, 0), (0.5, 0, 0)]) == [0, 1]


@pytest.mark.parametrize(("best", "proposed", "found"), [
    ([1, 2, 3], [1, 2], [1, 2, 3]), ([1, 2, 3], [1, 9], [1, 2]), ([1, 2, 3], [9, 2], [1]), ([5], [], [5]),
])
def test_greedy_verification(best, proposed, found):
    assert accept_greedy(best, proposed) == found


def enumerate_first(p, q):
    """Exact distribution of the first token for one proposal, all draws on a grid fine enough to be exact.

    p, q: in parts of PARTS. A proposal x has weight q[x]; acceptance and replacement are uniform on midpoints.
    """
    target = torch.tensor([p, p], dtype=torch.float64) / PARTS
    draft = torch.tensor(q, dtype=torch.float64) / PARTS
    more = sum(max(a - b, 0) for a, b in zip(p, q, strict=True))
    total = [Fraction(0)] * len(p)
    accept_grid = math.lcm(*(max(1, n) for n in q))             # accept * q[x] < p[x] on exactly p[x] / q[x] of it
    for x, weight in enumerate(q):
        if not weight:
            continue
        for a, b in itertools.product(range(accept_grid), range(max(more, 1))):
            draws = [(0.0, (a + 0.5) / accept_grid, (b + 0.5) / max(more, 1)), (0.5, 0.0, 0.0)]
            first = accept_sampled(target, [x], [draft], draws)[0]
            total[first] += Fraction(weight, PARTS) / accept_grid / max(more, 1)
    return total


@pytest.mark.parametrize(("p", "q"), [
    ([6, 10, 2, 2], [4, 4, 8, 4]), ([6, 10, 2, 2], [4, 6, 6, 4]), ([5, 5, 5, 5], [5, 5, 5, 5]),
    ([20, 0, 0, 0], [0, 0, 10, 10]), ([0, 1, 9, 10], [10, 9, 1, 0]), ([10, 10, 0, 0], [0, 20, 0, 0]),
])
def test_sampled_verification_gives_exactly_the_models_distribution(p, q):
    assert enumerate_first(p, q) == [Fraction(n, PARTS) for n in p]


def test_a_whole_draft_gives_the_joint_distribution():
    """Two proposals and the bonus, by enumerating all draws: each place follows p, given those before it stood."""
    p, q = [Fraction(1, 2), Fraction(1, 2)], [Fraction(1, 4), Fraction(3, 4)]
    target = torch.tensor([[float(x) for x in p]] * 3, dtype=torch.float64)
    draft = torch.tensor([float(x) for x in q], dtype=torch.float64)
    joint = {}
    for first, second in itertools.product(range(2), repeat=2):
        weight = q[first] * q[second]
        for a, b, c in itertools.product(range(6), range(6), range(2)):
            draws = [(0, (a + 0.5) / 6, 0.5), (0, (b + 0.5) / 6, 0.5), ((c + 0.5) / 2, 0, 0)]
            tokens = tuple(accept_sampled(target, [first, second], [draft, draft], draws))
            joint[tokens] = joint.get(tokens, Fraction(0)) + weight / 72
    def follows(prefix):
        return sum((w for tokens, w in joint.items() if tokens[: len(prefix)] == prefix), Fraction(0))
    assert follows((0,)) == follows((1,)) == Fraction(1, 2)
    for first in range(2):
        reached = sum((w for tokens, w in joint.items() if tokens[0] == first and len(tokens) > 1), Fraction(0))
        assert follows((first, 0)) == follows((first, 1)) == reached / 2


def test_a_cut_token_is_never_accepted():
    """top_k = 1 at the model leaves token 1 only, whatever is proposed."""
    proposal = Proposal([0], [torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)])
    for seed in range(20):
        found = verify([request([7], top_k=1, seed=seed)], [proposal], rows(TARGET, TARGET))
        assert [new.token for new in found[0]] == [1]


def test_a_ragged_batch_with_log_probabilities():
    a, b = request([7], temperature=0, logprobs=True), request([7, 8], temperature=0, top_logprobs=2)
    other = [0.10, 0.10, 0.60, 0.20]
    found = verify([a, b], [Proposal([1, 0], []), Proposal([2], [])], rows(TARGET, other, TARGET, other, TARGET))
    assert [[new.token for new in own] for own in found] == [[1, 2], [2, 1]]
    logs = [[new.logprob for new in own] for own in found]
    assert logs[0] == pytest.approx(rows([0.5, 0.6])[0].tolist()) and logs[1] == pytest.approx(
        rows([0.6, 0.5])[0].tolist())
    assert [token for token, _ in found[1][0].top] == [2, 3] and found[0][0].top == ()


def test_bad_logits_name_the_request_and_the_place():
    bad = rows(TARGET, TARGET)
    bad[1] = torch.nan
    with pytest.raises(LogitsError, match="sequence 3: the largest logit for position 2 is nan"):
        verify([request([7], temperature=0)], [Proposal([1], [])], bad)
    with pytest.raises(LogitsError, match="sequence 3: the largest logit for position 3"):
        extend([request([7], temperature=0)], [Proposal([1, 2], [])], bad[1:])


def test_acceptance_counts():
    """Rounds of 3: all stood, the first failed, one stood; and a round of 1 that stood."""
    counts = Acceptance()
    assert (counts.share, counts.acceptance, counts.tokens_per_round) == (0, 0, 0)
    for proposed, accepted in ((3, 3), (3, 0), (3, 1), (1, 1)):
        counts.add(proposed, accepted)
    assert (counts.rounds, counts.proposed, counts.accepted) == (4, 10, 5)
    assert counts.tested == [4, 2, 1] and counts.stood == [3, 1, 1]
    assert counts.by_place == [0.75, 0.5, 1.0] and counts.share == 0.5 and counts.acceptance == 5 / 7
    assert counts.tokens_per_round == 9 / 4
    with pytest.raises(ValueError, match="3 of 2 proposals"):
        counts.add(2, 3)
