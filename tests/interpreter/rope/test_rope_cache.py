"""Rotary positions fused with the cache write, in the interpreter against the plain form."""
import pytest
import torch

from gptoss_kernels.reference.fused import rope_cache
from gptoss_kernels.reference.rope import rope_concentration, rope_frequencies, rope_table
from gptoss_kernels.rope import rope_cache_triton

PAGE = 4


def tables(positions, head_dim):
    return rope_table(torch.arange(positions), rope_frequencies(head_dim), rope_concentration(32.0))


def inputs(tokens, heads, kv_heads, d, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d, generator=g).to(dtype)
    positions = torch.randint(0, 200, (tokens,), generator=g, dtype=torch.int32)
    pages = -(-2 * tokens // PAGE) + 1
    slots = torch.randperm(pages * PAGE, generator=g)[:tokens].to(torch.int32)
    return qkv, positions, slots, pages


@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "d"),
                         [(1, 8, 2, 64), (5, 6, 2, 32), (131, 64, 8, 64), (7, 5, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["pages", "contiguous", "placed", "fp8", "fp8 placed"])
def test_equals_the_plain_form(tokens, heads, kv_heads, d, dtype, form):
    qkv, positions, slots, pages = inputs(tokens, heads, kv_heads, d, dtype)
    slots[::3] = -1                                                      # not kept
    cos, sin = tables(200, d)
    made = []
    for run in (rope_cache_triton, rope_cache):
        kind = torch.float8_e4m3fn if "fp8" in form else dtype
        k, v = (torch.full((pages, PAGE, kv_heads, d), 7.0).to(kind) for _ in range(2))
        more = {}
        if "fp8" in form:
            more["scales"] = (torch.linspace(0.01, 0.02, kv_heads), torch.linspace(0.02, 0.004, kv_heads))
        if form not in ("pages", "fp8"):
            more["keys"], more["values"] = (torch.full((tokens + 3, kv_heads, d), 9.0).to(dtype) for _ in range(2))
        if "placed" in form:
            more["rows"] = (torch.arange(tokens, dtype=torch.int32) + 3).flip(0).contiguous()
        q = run(qkv, positions, cos, sin, k, v, slots, heads=heads, **more)
        made.append([q, k, v, *(more[name] for name in ("keys", "values") if name in more)])
    for ours, want in zip(*made, strict=True):
        if ours.dtype == torch.float8_e4m3fn:
            a, b = ours.view(torch.uint8).int(), want.view(torch.uint8).int()
            assert (a - b).abs().max() <= 1 and (a == b).float().mean() > 0.999
        elif "fp8" in form and ours.shape[1] == kv_heads:                # a step of e4m3, where it rounds otherwise
            near = (ours.float() - want.float()).abs() <= 2**-3 * want.float().abs() + 2e-4
            assert near.all() and (ours == want).float().mean() > 0.999
        elif dtype == torch.float32:
            assert (ours - want).abs().max() <= 1e-6 * want.abs().max()
        else:
            assert (ours != want).float().mean() < 1e-3                  # fp32 on either side of an edge
            assert (ours.float() - want.float()).abs().max() <= 2**-8 * want.float().abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [rope_cache_triton, rope_cache])
def test_contiguous_rows_are_what_the_e4m3_pages_hold(run, dtype):
    """Bit for bit stored * scale in the model's dtype, beyond 448 scales too."""
    qkv, positions, slots, pages = inputs(9, 4, 2, 32, dtype)
    cos, sin = tables(200, 32)
    scales = torch.tensor([0.011, 0.003]), torch.tensor([0.02, 0.001])       # 448 * 0.001: many values are cut
    k, v = (torch.zeros(pages, PAGE, 2, 32).to(torch.float8_e4m3fn) for _ in range(2))
    keys, values = (torch.zeros(9, 2, 32, dtype=dtype) for _ in range(2))
    run(qkv, positions, cos, sin, k, v, slots, heads=4, scales=scales, keys=keys, values=values)
    for stored, scale, rows in ((k, scales[0], keys), (v, scales[1], values)):
        held = stored.view(-1, 2, 32)[slots.long()].float() * scale[:, None]
        assert torch.equal(held.to(dtype), rows)
    assert values.abs().max() > 0.44 and (values[:, 1].abs() <= 0.4490).all()
    exact = qkv[:, -64:].view(9, 2, 32)[:, 0]
    assert not torch.equal(values[:, 0], exact) and ((values[:, 0] - exact).abs() <= exact.abs() / 16 + 2e-4).all()


def test_untouched_rows_stay_and_every_part_matters():
    qkv, positions, slots, pages = inputs(6, 4, 2, 32, torch.float32)
    cos, sin = tables(200, 32)
    k, v = (torch.full((pages, PAGE, 2, 32), 7.0) for _ in range(2))
    q = rope_cache_triton(qkv, positions, cos, sin, k, v, slots, heads=4)
    rest = torch.ones(pages * PAGE, dtype=torch.bool)
    rest[slots.long()] = False
    assert (k.view(-1, 2, 32)[rest] == 7).all() and (v.view(-1, 2, 32)[rest] == 7).all()
    assert torch.equal(v.view(-1, 2, 32)[slots.long()], qkv[:, -64:].view(6, 2, 32))   # values are not turned
    moved = rope_cache_triton(qkv, positions.flip(0).contiguous(), cos, sin, k.clone(), v.clone(), slots, heads=4)
    assert not torch.equal(moved[0], q[0])


@pytest.mark.parametrize(("change", "message"), [
    ({"qkv": torch.zeros(3, 100)}, "qkv has shape"),
    ({"slots": torch.zeros(3)}, "slots is torch.float32"),
    ({"positions": torch.zeros(2, dtype=torch.int32)}, "positions"),
    ({"cos": torch.zeros(9, 8)}, "cos"),
    ({"keys": torch.zeros(3, 2, 32)}, "belong together"),
    ({"scales": (torch.ones(2), torch.ones(2))}, "scales given"),
])
def test_bad_input(change, message):
    good = {"qkv": torch.zeros(3, 8 * 32), "positions": torch.zeros(3, dtype=torch.int32), "cos": torch.zeros(9, 16),
            "sin": torch.zeros(9, 16), "k_pages": torch.zeros(2, PAGE, 2, 32), "v_pages": torch.zeros(2, PAGE, 2, 32),
            "slots": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        rope_cache_triton(**{**good, **change}, heads=4)
