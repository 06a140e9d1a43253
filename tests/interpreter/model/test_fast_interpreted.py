"""The fast forward with its own Triton kernels in the interpreter, against the plain Transformer."""
import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_kernels.quant import Quantised
from gptoss_lab.model.fast import FastTransformer, LaidOut, lay_out, make_pool
from gptoss_lab.model.load import build_model

EXACT = 1e-5


@pytest.fixture(scope="module")
def source():
    return random_source(config(num_layers=2, max_position_embeddings=512))


@pytest.fixture(scope="module")
def plain(source):
    return build_model(source, dtype=torch.float32)


def fast(source, backends=None, experts="fp8", projections="dense", **more):
    weights = lay_out(source, "cpu", torch.float32, experts=experts, projections=projections)
    return FastTransformer(weights, make_pool(weights, tokens=200, sequences=4, page_size=16), backends=backends,
                           **more)


def logits_of(model, ids, chunks, decoded):
    """Logits of every position: `chunks` read one after the other, the rest decoded one by one."""
    cache, at, parts = model.new_cache(), 0, []
    for size in [*chunks, *[1] * decoded]:
        parts.append(model(ids[at : at + size], [size], [cache], logits="all" if size > 1 else "last"))
        at += size
    return torch.cat(parts)


def test_own_kernels_around_plain_experts_are_exact(source, plain):
    """Norm, RoPE and cache write, attention (ragged, paged, decode) interpreted; no e4m3 activation anywhere."""
    model = fast(source, {"moe_layer": "reference"}, sizes=(4,))
    chosen = {operation: backend for operation, backend, _ in model.operations.table()}
    assert chosen["norm_residual"] == chosen["rope_cache"] == "triton" and chosen["moe_layer"] == "reference"
    ids = tokens(model.config, 40)
    got = logits_of(model, ids, [17, 20], 3)
    assert distance(got, plain(ids, logits="all")) <= EXACT
    kinds = {plan.choice.backend for plan in model._decode.captured[4].decode.plans}
    assert kinds == {"triton"}


def test_own_kernels_over_an_e4m3_pool(source, plain):
    """Against the plain model over such a pool: prefill in chunks, decode and a step of three tokens each, where a few
    codes may lie on the other side of a tie."""
    weights, pools = lay_out(source, "cpu", torch.float32, experts="fp8"), []
    for _ in range(2):
        pools.append(make_pool(weights, tokens=200, sequences=2, page_size=16, draft=2, kv_form="fp8"))
        pools[-1].key_scales.copy_(torch.tensor([[0.02, 0.03], [0.025, 0.02]]))
        pools[-1].value_scales.copy_(torch.tensor([[0.01, 0.015], [0.02, 0.01]]))
    model = FastTransformer(weights, pools[0], backends={"moe_layer": "reference"}, sizes=(4,))
    ids, results = tokens(model.config, 44), []
    for runs, pool in ((model, pools[0]), (plain, pools[1])):
        cache = pool.new_cache()
        with torch.inference_mode():
            results.append(torch.cat([runs(part, [len(part)], [cache], logits="all")
                                      for part in ids.split([17, 20, 1, 3, 1, 2])]))
    assert {plan.choice.backend for plan in model._decode.captured[4].decode.plans} == {"triton"}
    apart = sum(int((a[3:].view(torch.uint8) != b[3:].view(torch.uint8)).sum())
                for a, b in zip(pools[0].keys + pools[0].values, pools[1].keys + pools[1].values, strict=True))
    assert apart <= 5 and distance(*results) <= (EXACT if apart == 0 else 0.05)
    assert distance(results[0], plain(ids, logits="all")) > 1e-3


@pytest.mark.parametrize(("projections", "limit"), [("dense", 0.03), ("fp8", 0.05)])
def test_e4m3_activations_cost_a_few_per_cent(source, projections, limit):
    """Everything interpreted, against the plain fp32 model of the very same weights: two e4m3 roundings of activations
    in each expert layer, and two more with e4m3 projections."""
    model = fast(source, projections=projections, sizes=(4,))
    assert {b for operation, b, _ in model.operations.table() if "attention" not in operation} == {"triton"}
    ids = tokens(model.config, 19)
    plain = build_model(LaidOut(model.weights), dtype=torch.float32)
    got, exact = logits_of(model, ids, [17], 2), plain(ids, logits="all")
    error = (got - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-3 < error.median() <= limit


def test_rows_that_attention_quantises_change_no_bit():
    """Two chunks of a prompt with e4m3 projections, over contiguous keys and over pages: the very logits of a forward
    whose output projection quantises them."""
    source = random_source(config(num_layers=2, max_position_embeddings=512, num_heads=4, head_dim=64))
    model = fast(source, {"moe_layer": "reference"}, projections="fp8", graphs=False)
    ids, results, given = tokens(model.config, 66), [], []
    model._forward._next_norm = lambda *_: None                          # plain experts round otherwise than a kernel
    join = model._forward._join
    model._forward._join = lambda base, rows, *more: given.append(type(rows)) or join(base, rows, *more)
    for rounds in (True, False):
        model._forward._rounds = rounds
        results.append(logits_of(model, ids, [33, 33], 0))
    assert torch.equal(*results) and given == [Quantised] * 4 + [torch.Tensor] * 4


def test_padding_rows_change_no_bit(source):
    """Three requests in a step of four and of eight rows: the same logits, in the decode form of every kernel."""
    results = []
    for size in (4, 8):
        model = fast(source, sizes=(size,))
        caches = [model.new_cache() for _ in range(3)]
        ids = tokens(model.config, 6)
        results.append(torch.stack([model(part, [1, 1, 1], caches) for part in ids.split(3)]))
    assert torch.equal(*results)
