"""Random ragged batches, their paged twins and what attention must give for them, in fp64."""
from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_kernels.reference.attention import log_sum_exp_without_sink, sink_attention

# Largest relative error (norm of the difference over the norm) and error of the LSE for each storage format. The
# interpreter rounds bf16 towards zero, which costs twice what a GPU's rounding does.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 8e-3}
LSE_TOLERANCE = 1e-5


@dataclass
class Batch:
    """q [Tq, Hq, D], k, v [Tk, Hkv, D] of one dtype, sinks [Hq], the offsets, and the window."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor
    cu_q: list[int]
    cu_k: list[int]
    window: int | None

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """out, LSE with the sink, LSE without, all computed in fp64."""
        where = {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k, "window": self.window, "dtype": torch.float64}
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        out, with_sink = sink_attention(q, k, v, self.sinks, **where)
        return out, with_sink, log_sum_exp_without_sink(q, k, **where)


def offsets(lengths: list[int]) -> list[int]:
    """[0, l0, l0 + l1, ...]"""
    return [0, *torch.tensor(lengths).cumsum(0).tolist()] if lengths else [0]


def make_batch(
    q_lens: list[int], k_lens: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    window: int | None, seed: int = 0, sinks: list[float] | None = None, spread: float = 1.0,
) -> Batch:
    """Gaussian q, k, v (q times `spread`); sinks cycle through the list given, or are Gaussian."""
    g = torch.Generator().manual_seed(seed)
    cu_q, cu_k = offsets(q_lens), offsets(k_lens)
    q = torch.randn(cu_q[-1], heads, dim, generator=g) * spread
    k = torch.randn(cu_k[-1], kv_heads, dim, generator=g)
    v = torch.randn(cu_k[-1], kv_heads, dim, generator=g)
    s = torch.randn(heads, generator=g) * 2
    if sinks:
        s = torch.tensor([sinks[h % len(sinks)] for h in range(heads)])
    return Batch(q.to(dtype), k.to(dtype), v.to(dtype), s, cu_q, cu_k, window)


def to_pages(
    batch: Batch, page_size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The batch's keys and values scattered over shuffled pages: k_pages, v_pages, kv_lens int32, page_table int32.

    Unused rows and pages hold NaN, so that reading one shows.
    """
    lens = [b - a for a, b in zip(batch.cu_k[:-1], batch.cu_k[1:], strict=True)]
    used = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(seed))
    shape = (sum(used) + 2, page_size, *batch.k.shape[1:])
    k_pages, v_pages = (torch.full(shape, torch.nan, dtype=batch.k.dtype) for _ in range(2))
    table = torch.full((len(lens), max([1, *used])), int(order[0]), dtype=torch.int32)
    place = 1
    for b, n in enumerate(lens):
        for j in range(used[b]):
            table[b, j] = page = int(order[place])
            rows = slice(batch.cu_k[b] + j * page_size, batch.cu_k[b] + min((j + 1) * page_size, n))
            place += 1
            count = rows.stop - rows.start
            k_pages[page, :count], v_pages[page, :count] = batch.k[rows], batch.v[rows]
    return k_pages, v_pages, torch.tensor(lens, dtype=torch.int32), table


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Every value finite and the relative error within the format's tolerance."""
    assert torch.isfinite(actual).all(), "output has NaN or infinity"
    error = float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-12))
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}, {TOLERANCE[dtype]:.0e} is allowed"


def assert_lse(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """-inf exactly where expected, else within tolerance (relative to values beyond 1)."""
    assert torch.equal(actual == -torch.inf, expected == -torch.inf)
    seen = expected != -torch.inf
    error = ((actual.double() - expected)[seen].abs() / expected[seen].abs().clamp_min(1)).max() if seen.any() else 0.0
    assert float(error) < LSE_TOLERANCE, f"LSE differs by {float(error):.2e}"
