"""Attention that writes e4m3: the codes and scales of `norm_quantise` of its own ordinary output, and near fp64."""
from __future__ import annotations

import pytest
import torch
from attention_cases import Batch, make_batch, to_pages
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_kernels.attention import LayerKind, PagedDecode, PagedPrefill, Prefill
from gptoss_kernels.quant import Quantised, empty_quantised, norm_quantise
from gptoss_kernels.reference.quant import dequantise_groups

OWN = [(8, 1, 64), (16, 2, 16), (4, 2, 64), (12, 2, 64), (3, 3, 128), (2, 2, 256)]   # key heads of whole groups
OTHERS = [(6, 2, 32), (4, 4, 16), (5, 1, 64)]                                        # quantised by a second launch
ROOM = 5                                                     # rows behind the last, for the end of a tile


def poisoned(rows: int, columns: int) -> Quantised:
    """Room whose codes and scales are all NaN."""
    made = empty_quantised(rows, columns, "cpu")
    made.values.view(torch.uint8).fill_(0x7F)
    made.scale.fill_(torch.nan)
    return made


def same(got: Quantised, rows: torch.Tensor) -> bool:
    """Whether the first rows are `rows` [T, Hq, D] quantised, and those behind them untouched."""
    wanted, t = norm_quantise(rows.flatten(1)), len(rows)
    return (torch.equal(got.values[:t].view(torch.uint8), wanted.values.view(torch.uint8))
            and torch.equal(got.scale[:t], wanted.scale)
            and bool((got.values[t:].view(torch.uint8) == 0x7F).all() and got.scale[t:].isnan().all()))


def check(plan: Prefill | PagedPrefill, batch: Batch, *keys: torch.Tensor, **more: object) -> None:
    """Both outputs of a plan, and their LSE."""
    t, heads, dim = batch.q.shape
    plain, lse = plan.run(batch.q, *keys, batch.sinks, **more)
    out = poisoned(t + ROOM, heads * dim)
    got, again = plan.run(batch.q, *keys, batch.sinks, out=out, **more)
    assert got is out and torch.equal(lse, again) and same(got, plain)
    exact = batch.expected()[0].flatten(1)
    meant = dequantise_groups(got.values[:t], got.scale[:t], dtype=torch.float64)
    assert float((meant - exact).norm() / exact.norm()) < 0.04


def layer(shape: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> LayerKind:
    return LayerKind(*shape, dtype, window)


@pytest.mark.parametrize(("shape", "dtype", "lse"), [
    *((shape, torch.bfloat16, "with_sink") for shape in OWN + OTHERS), (OWN[0], torch.float32, "without_sink"),
    (OWN[2], torch.float16, "with_sink"),
])
@pytest.mark.parametrize("window", [None, 20])
def test_ragged_rows(shape, dtype, lse, window):
    batch = make_batch([0, 1, 19], [3, 1, 40], *shape, dtype, window)
    plan = Prefill(layer(shape, dtype, window), batch.cu_q, batch.cu_k, device="cpu", backend="triton", lse=lse)
    assert plan._kernel.quantises == (shape in OWN)
    check(plan, batch, batch.k, batch.v)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 50)), shape=st.sampled_from([*OWN[:4], OTHERS[0]]),
    seed=st.integers(0, 1000),
)
def test_any_raggedness_and_pages(lengths, window, shape, seed):
    batch = make_batch([q for q, _ in lengths], [q + past for q, past in lengths], *shape, torch.bfloat16, window, seed)
    kind = layer(shape, torch.bfloat16, window)
    check(Prefill(kind, batch.cu_q, batch.cu_k, device="cpu", backend="triton", lse="with_sink"), batch, batch.k,
          batch.v)
    k_pages, v_pages, lens, table = to_pages(batch, 16, seed)
    check(PagedPrefill(kind, batch.cu_q, lens, table, page_size=16, device="cpu", backend="triton", lse="with_sink"),
          batch, k_pages, v_pages)


def test_rows_that_see_no_key_are_zeros_with_scale_one():
    batch = make_batch([5], [2], 8, 1, 64, torch.bfloat16, None)
    out = poisoned(5, 512)
    Prefill(layer((8, 1, 64), torch.bfloat16, None), [0, 5], [0, 2], device="cpu", backend="triton").run(
        batch.q, batch.k, batch.v, batch.sinks, out=out)
    assert (out.values[:3].float() == 0).all() and (out.scale[:3] == 1).all()
    assert (out.values[3:].float().abs().amax(dim=1) == 448).all() and (out.scale[3:] < 1).all()


def test_a_group_has_its_own_scale():
    """Values of one key head times 1000: its groups' scales follow, the codes stay, and nothing else changes."""
    batch = make_batch([9], [30], 8, 2, 64, torch.float32, None)
    results = []
    for factor in (1.0, 1024.0):
        v = batch.v.clone()
        v[:, 1] *= factor
        results.append(Prefill(layer((8, 2, 64), torch.float32, None), [0, 9], [0, 30], device="cpu",
                               backend="triton").run(batch.q, batch.k, v, batch.sinks, out=poisoned(9, 512)))
    (codes, scale), (again, larger) = results
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(larger, scale * torch.tensor([1.0, 1.0, 1024.0, 1024.0]))


def test_decode_quantises_in_a_second_launch():
    batch = make_batch([1, 1, 1], [40, 7, 90], 8, 1, 64, torch.bfloat16, None)
    k_pages, v_pages, lens, table = to_pages(batch, 16)
    plan = PagedDecode(layer((8, 1, 64), torch.bfloat16, None), batch=3, max_kv_len=96, page_size=16, device="cpu",
                       backend="triton")
    plan.step(lens, table)
    out = plan.run(batch.q, k_pages, v_pages, batch.sinks, out=poisoned(3 + ROOM, 512))
    assert same(out, plan.run(batch.q, k_pages, v_pages, batch.sinks))
