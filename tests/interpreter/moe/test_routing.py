"""Routing kernels in the interpreter against fp64, and their placement against the closed form."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.moe import choose, group_layout, place, route, routing
from gptoss_kernels.quant import norm_quantise
from gptoss_kernels.reference.moe import route as reference_route
from gptoss_kernels.reference.norm import rms_norm


def direct_logits(values: torch.Tensor):
    """A router that returns the hidden state itself as logits: x [T, E], identity weight, no bias."""
    e = values.shape[1]
    return values, torch.eye(e), torch.zeros(e)


def check_placement(r, ids, experts, align):
    counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
    layout = group_layout(counts, align)
    assert r.counts.tolist() == counts
    assert [s for s, c in zip(r.starts.tolist(), counts, strict=True) if c] == [
        s for s, c in zip(layout.starts, counts, strict=True) if c]
    place = list(layout.starts)
    for t, row in enumerate(ids.tolist()):                              # stable: token order inside an expert
        for k, e in enumerate(row):
            assert r.row_of[t, k] == place[e]
            assert r.token_of[place[e]] == t and r.row_expert[place[e]] == e
            place[e] += 1
    owner = [e for e, a in enumerate(layout.aligned) for _ in range(a // align)]
    tiles = r.tile_expert.shape[0]
    assert r.tile_expert.tolist() == owner + [-1] * (tiles - len(owner))
    real = [min(align, c - i) for c in counts for i in range(0, c, align)]
    assert r.tile_rows[: len(owner)].tolist() == real
    padding = torch.ones(r.rows, dtype=torch.bool)
    padding[r.row_of.flatten().long()] = False
    assert (r.token_of[padding] == -1).all() and (r.row_expert[padding] == -1).all()


@pytest.mark.parametrize(("tokens", "experts", "hidden"),
                         [(1, 32, 96), (7, 5, 200), (128, 32, 96), (129, 32, 96), (150, 128, 64)])
@pytest.mark.parametrize("align", [16, 64])
def test_choice_weights_and_places(tokens, experts, hidden, align):
    g = torch.Generator().manual_seed(tokens)
    x, gain = torch.randn(tokens, hidden, generator=g), torch.rand(hidden, generator=g) + 0.5
    w, b = torch.randn(experts, hidden, generator=g), torch.randn(experts, generator=g)
    r = route(x, w, b, norm_weight=gain, align=align)
    logits = rms_norm(x.double(), gain.double()) @ w.double().T + b.double()
    ids, weights = reference_route(logits, 4, torch.float64)
    assert torch.equal(r.ids.long(), ids)
    assert (r.weights - weights).abs().max() < 1e-5
    check_placement(r, ids, experts, align)


@pytest.mark.parametrize("tokens", [129, 300])
def test_counts_scanned_once_give_the_same_places(monkeypatch, tokens):
    logits = torch.randn(tokens, 20, generator=torch.Generator().manual_seed(tokens))
    summed = route(*direct_logits(logits), align=16, local_experts=(2, 19))
    monkeypatch.setattr(routing, "SCANNED_BLOCKS", 1)
    scanned = route(*direct_logits(logits), align=16, local_experts=(2, 19))
    for name in ("ids", "row_of", "counts", "starts", "tile_expert", "tile_rows", "token_of", "row_expert"):
        assert torch.equal(getattr(scanned, name), getattr(summed, name)), name
    whole = route(*direct_logits(logits), align=16)
    check_placement(whole, whole.ids.long(), 20, 16)


@pytest.mark.parametrize("tokens", [3, 130])
def test_bf16_rows_round_once_after_the_norm(tokens):
    g = torch.Generator().manual_seed(1)
    x, gain = torch.randn(tokens, 96, generator=g).bfloat16(), (torch.rand(96, generator=g) + 0.5).bfloat16()
    w, b = torch.randn(32, 96, generator=g).bfloat16(), torch.randn(32, generator=g).bfloat16()
    r = route(x, w, b, norm_weight=gain, align=16)
    ids, weights = reference_route(rms_norm(x, gain).double() @ w.double().T + b.double(), 4, torch.float64)
    same = (r.ids.long() == ids).all(dim=1)
    assert same.float().mean() > 0.98                                   # a bf16 ulp of the norm may flip a near-tie
    assert (r.weights - weights)[same].abs().max() < 2e-2


@pytest.mark.parametrize("tokens", [1, 200])
def test_softmax_is_over_the_selected(tokens):
    logits = torch.tensor([[3.0, 2, 1, 0, -1, -2, -3, -4]]).repeat(tokens, 1)
    r = route(*direct_logits(logits), align=16)
    assert r.ids[-1].tolist() == [0, 1, 2, 3]
    assert torch.allclose(r.weights[-1], torch.tensor([0.643914, 0.236883, 0.087144, 0.032059]), atol=1e-6)
    before = route(*direct_logits(logits), align=16, softmax="before")
    assert torch.allclose(before.weights[-1, 0], torch.tensor(0.632333), atol=1e-6)
    assert torch.allclose(before.weights[-1].sum(), torch.tensor(0.982014), atol=1e-6)


@pytest.mark.parametrize("tokens", [2, 150])
def test_ties_go_to_the_lowest_id(tokens):
    logits = torch.tensor([[0.0, 1, 1, 0, 1, 0, 1, 1, 1]]).repeat(tokens, 1)
    assert route(*direct_logits(logits), align=16).ids[-1].tolist() == [1, 2, 4, 6]
    flat = route(*direct_logits(torch.zeros(tokens, 7)), align=16)
    assert flat.ids[-1].tolist() == [0, 1, 2, 3]
    assert torch.allclose(flat.weights[-1], torch.full((4,), 0.25))


def test_rounding_switches():
    logits = torch.tensor([[1.0, 1.001, 0.5, 0.25, 0.125]])            # 1.001 is 1.0 in bf16: a tie, so expert 0 leads
    assert route(*direct_logits(logits), align=16).ids[0, 0] == 1
    rounded = route(*direct_logits(logits), align=16, logits_dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
    assert rounded.ids[0, 0] == 0 and rounded.weights.dtype == torch.bfloat16
    exact = torch.softmax(logits.bfloat16().float()[:, [0, 1, 2, 3]], dim=-1)
    assert torch.equal(rounded.weights, exact.bfloat16())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.booleans())
def test_any_group_sizes(choices, many):
    """Each token goes to expert c and the next: experts may be empty, or take every row."""
    tokens = choices * (160 // len(choices) + 1) if many else choices
    logits = torch.zeros(len(tokens), 8)
    for t, c in enumerate(tokens):
        logits[t, c], logits[t, c + 1] = 9.0, 8.0
    r = route(*direct_logits(logits), experts_per_token=2, align=16)
    ids = torch.tensor([[c, c + 1] for c in tokens])
    assert torch.equal(r.ids.long(), ids)
    check_placement(r, ids, 8, 16)


@pytest.mark.parametrize("tokens", [5, 140])
def test_experts_held_elsewhere_get_no_row(tokens):
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, 12, generator=g)
    whole, part = route(*direct_logits(logits), align=16), route(*direct_logits(logits), align=16, local_experts=(4, 9))
    assert torch.equal(whole.ids, part.ids) and torch.equal(whole.weights, part.weights)
    here = (part.ids >= 4) & (part.ids < 9)
    assert torch.equal(part.row_of >= 0, here)
    assert part.counts.tolist() == whole.counts[4:9].tolist()


def test_bias_takes_part_in_the_choice():
    x, w = torch.zeros(3, 16), torch.zeros(8, 16)
    bias = torch.tensor([0.0, 0, 0, 0, 1, 2, 3, 4])
    r = route(x, w, bias, align=16)
    assert r.ids[0].tolist() == [7, 6, 5, 4]
    assert torch.allclose(r.weights[0], torch.softmax(torch.tensor([4.0, 3, 2, 1]), 0))


@pytest.mark.parametrize(("change", "message"), [
    ({"x": torch.zeros(0, 16)}, "at least one row"),
    ({"router_weight": torch.zeros(8, 8)}, "router weight"),
    ({"router_weight": torch.zeros(8, 16).bfloat16()}, "one dtype"),
    ({"norm_weight": torch.zeros(8)}, "norm weight"),
    ({"experts_per_token": 9}, "experts per token"),
    ({"softmax": "during"}, "'after' or 'before'"),
    ({"logits_dtype": torch.float16}, "logits_dtype"),
    ({"align": 48}, "power of two"),
    ({"local_experts": (4, 12)}, "local experts"),
])
def test_bad_input(change, message):
    good = {"x": torch.zeros(2, 16), "router_weight": torch.zeros(8, 16), "router_bias": torch.zeros(8)}
    with pytest.raises(ValueError, match=message):
        route(**{**good, **change})


@pytest.mark.parametrize(("tokens", "real"), [(1, 0), (8, 5), (7, 7), (16, 9), (128, 100), (150, 70), (200, 0)])
def test_padding_rows_get_no_expert_no_place_and_no_count(tokens, real):
    """All three forms of the launch: what is placed is what the real rows alone would be; padding rows may be NaN."""
    g = torch.Generator().manual_seed(tokens)
    x, gain = torch.randn(tokens, 96, generator=g), torch.rand(96, generator=g) + 0.5
    w, b = torch.randn(12, 96, generator=g), torch.randn(12, generator=g)
    x[real:] = torch.nan
    r = route(x, w, b, norm_weight=gain, align=16, num_tokens=torch.tensor([real], dtype=torch.int32))
    assert (r.ids[real:] == -1).all() and (r.weights[real:] == 0).all() and (r.row_of[real:] == -1).all()
    assert r.counts.sum() == 4 * real
    if real == 0:
        assert (r.tile_expert == -1).all() and (r.token_of == -1).all()
        return
    alone = route(x[:real].contiguous(), w, b, norm_weight=gain, align=16)
    assert torch.equal(r.ids[:real], alone.ids)
    assert torch.allclose(r.weights[:real], alone.weights, atol=1e-6)
    assert torch.equal(r.counts, alone.counts) and torch.equal(r.row_of[:real], alone.row_of)
    rows = alone.rows
    assert torch.equal(r.token_of[:rows], alone.token_of) and (r.token_of[rows:] == -1).all()


def test_padding_rows_with_experts_held_elsewhere():
    g = torch.Generator().manual_seed(4)
    logits, real = torch.randn(20, 12, generator=g), torch.tensor([13], dtype=torch.int32)
    r = route(*direct_logits(logits), align=16, local_experts=(4, 9), num_tokens=real)
    here = (r.ids >= 4) & (r.ids < 9)
    assert torch.equal(r.row_of >= 0, here) and not here[13:].any() and r.counts.sum() == here.sum()
    with pytest.raises(ValueError, match="num_tokens"):
        route(*direct_logits(logits), align=16, num_tokens=torch.tensor(13))


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("hidden", [64, 224, 320])
def test_rows_quantised_on_the_way(tokens, hidden):
    """The same choice as without, and bit for bit what `norm_quantise` gives; beyond 128 tokens nothing."""
    x, gain = torch.randn(tokens, hidden), torch.rand(hidden) + 0.5
    w, b = torch.randn(8, hidden), torch.randn(8)
    r, plain = (route(x, w, b, norm_weight=gain, align=16, quantise=q) for q in (True, False))
    q, scale = norm_quantise(x, gain)
    assert torch.equal(r.ids, plain.ids) and torch.equal(r.weights, plain.weights) and plain.quantised is None
    assert torch.equal(r.quantised[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(r.quantised[1], scale)


def test_many_rows_are_not_quantised_on_the_way():
    assert route(torch.randn(130, 64), torch.randn(8, 64), torch.randn(8), quantise=True).quantised is None


@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
def test_chosen_here_and_placed_elsewhere(tokens):
    """The two halves of `route`, bit for bit, for the experts of a rank."""
    g = torch.Generator().manual_seed(tokens)
    x, gain = torch.randn(tokens, 96, generator=g), torch.rand(96, generator=g) + 0.5
    given = torch.randn(12, 96, generator=g), torch.randn(12, generator=g)
    whole = route(x, *given, norm_weight=gain, align=16, local_experts=(4, 9))
    halves = [choose(rows.contiguous(), *given, norm_weight=gain) for rows in (x[: tokens // 2], x[tokens // 2 :])
              if len(rows)]
    ids, weights = (torch.cat(parts) for parts in zip(*halves, strict=True))
    assert torch.equal(ids, whole.ids) and torch.allclose(weights, whole.weights, atol=1e-6)
    placed = place(ids, weights, 5, first_expert=4, align=16)
    for name in ("row_of", "counts", "starts", "tile_expert", "tile_rows", "token_of", "row_expert"):
        assert torch.equal(getattr(placed, name), getattr(whole, name)), name
