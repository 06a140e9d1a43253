"""Public bug reports about parallel gpt-oss, as checks: P04, P08, P10 (P11 is in test_parallel_source.py)."""
import math

import pytest
import torch

from gptoss_kernels.reference.attention import sink_attention
from gptoss_kernels.reference.experts import ExpertMatrices, moe
from gptoss_lab.model.step import SplitStep
from gptoss_lab.parallel import Plan, share_of, simulate
from gptoss_lab.parallel.cuts import even_ranges
from gptoss_lab.parallel.sequence import SequenceSplit


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_p08_row_parallel_bias_once(ranks):
    """16 inputs over the ranks, bias [1, 2]: the sum has it once; (ranks - 1) * bias too much is the bug."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = torch.randn(3, 16, generator=g), torch.randn(2, 16, generator=g), torch.tensor([1.0, 2.0])

    def layer(own, once):
        part, place = even_ranges(16, ranks)[own.rank], own.plan_groups(Plan(1, 1, ranks))
        added = bias if not once or place.place.tp == 0 else torch.zeros(2)
        partial = torch.nn.functional.linear(x[:, part.start : part.stop], weight[:, part.start : part.stop], added)
        return place.tensor.all_reduce(partial, "row parallel")

    whole = torch.nn.functional.linear(x, weight, bias)
    for found in simulate(ranks, layer, True):
        assert torch.allclose(found, whole, atol=1e-5)
    for found in simulate(ranks, layer, False):
        assert torch.allclose(found - whole, (ranks - 1) * bias.expand(3, 2), atol=1e-5)


def test_p10_every_rank_computes_its_own_experts_only():
    """4 experts over two ranks, the token goes to 2 and 3 with .75 and .25, outputs [100, 200, 3, 5]."""
    outputs = torch.tensor([100.0, 200.0, 3.0, 5.0])
    ids, weights = torch.tensor([[2, 3]]), torch.tensor([[0.75, 0.25]])
    for rank, expected in ((0, 0.0), (1, 3.5)):
        held = even_ranges(4, 2)[rank]
        zeros = ExpertMatrices("dense", torch.zeros(2, 2, 1)), ExpertMatrices("dense", torch.zeros(2, 1, 1))
        part = moe(torch.ones(1, 1), ids, weights, zeros[0], torch.zeros(2, 2), zeros[1],
                   outputs[held.start : held.stop, None], first_expert=held.start)
        assert part.item() == expected


LOGITS, VALUES, SINK = [1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], 2.0
EXPECTED = 32.126854


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("cached", [0, 3])
def test_p04_sink_once_when_the_tokens_are_split(ranks, window, cached):
    """The last of four tokens sees the logits [1, 2, 3, 4] and a sink of 2, wherever its keys were computed.

    Once in the denominator: 32.126854. A sink lost gives 34.926527, one for each of two pieces 29.742711.
    """
    def attend(own):
        group = own.group(range(ranks))
        keys, values = torch.zeros(4, 1, 2), torch.tensor(VALUES)[:, None, None].expand(4, 1, 2).contiguous()
        keys[:, 0, 0] = torch.tensor(LOGITS)
        queries = torch.zeros(4, 1, 2)
        queries[:, 0, 0] = math.sqrt(2)                                 # scale 1 / sqrt(2)
        new = 4 - cached
        split = SequenceSplit([new], group, keep=True)
        mine = split.rows + cached
        caches = None
        if cached:
            from gptoss_lab.model.cache import FullLayer, SlidingLayer

            kind = (SlidingLayer(1, 2, window, torch.float32, torch.device("cpu")) if window
                    else FullLayer(1, 2, 8, torch.float32, torch.device("cpu")))
            kind.extend(keys[:cached], values[:cached])
            kind.commit()
            caches = [type("Cache", (), {"layers": [kind]})()]
        lengths = [s.stop - s.start for s in split.own]
        offsets = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
        step = SplitStep(offsets, None, None, caches, None, split, (window,))
        k, v, key_offsets = step.extend(0, keys[mine], values[mine])
        out, _ = sink_attention(queries[mine], k, v, torch.tensor([SINK]), cu_seqlens_q=offsets,
                                cu_seqlens_k=key_offsets, window=window)
        return split.last(out[:, 0])[0, 0].item()

    for found in simulate(ranks, attend):
        assert found == pytest.approx(EXPECTED, abs=2e-6)


def test_p04_the_numbers():
    weights = [math.exp(z) for z in LOGITS]
    assert sum(w * v for w, v in zip(weights, VALUES, strict=True)) / (
        sum(weights) + math.exp(SINK)) == pytest.approx(EXPECTED, abs=1e-6)


def test_p08_heads_and_slices_that_add_no_bias():
    """In every layout exactly one rank of those that sum adds each bias."""
    from parallel_cases import small_nano

    for plan in (Plan(1, 1, 4), Plan(2, 1, 4), Plan(2, 2, 2), Plan(1, 4, 1), Plan(4, 4, 1)):
        held = [share_of(small_nano(), plan, rank) for rank in range(plan.world)]
        assert sum(s.output_bias for s in held) == plan.dp
        assert sum(s.down_bias for s in held) == plan.ep


