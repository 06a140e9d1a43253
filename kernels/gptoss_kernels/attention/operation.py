"""Attention with sinks: ragged prefill, chunked prefill over a paged cache, paged decode. One API, several backends.

What: out = softmax([scale * q.k_j ..., sink])[without the sink's column] @ v, causal, in sliding layers over the last
`window` keys. The queries of a sequence are its last positions. A sink of -inf is no sink; a query that sees no key
gives 0, and an LSE that is its sink (or -inf without it).

How: each form is an object made once per step and kind of layer (full, sliding) and run once per layer: making it
picks the backend (`.choice` says which and why), does the host's share of the work and holds the workspaces; running it
only launches kernels, so a run can be captured in a CUDA graph. The functions below make and run in one go.

Pages may be e4m3 (`kv_dtype`), with one fp32 scale per key head for keys and one for values: row = stored * scale. The
key's scale is a factor of the scores and the value's one of the output, so each enters once per head and no row is ever
rescaled or copied.

Names: `lse="with_sink"` returns log(sum_j exp(z_j) + exp(sink)), the whole denominator; `lse="without_sink"` the keys'
part alone. Both are in natural-log units, fp32, [rows, heads]. `out` may be a `Quantised`: then the rows leave in e4m3,
[rows, heads * D] with a scale for each 128 columns, as an output projection in FP8 takes them (quantised.py).

What is lost: nothing is sharded here, and no gradient is computed.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gptoss_kernels.attention import layer as checks
from gptoss_kernels.attention.backends import choose_backend
from gptoss_kernels.attention.layer import AttentionError, LayerKind
from gptoss_kernels.attention.quantised import Output, check_quantised, quantise_rows
from gptoss_kernels.reference.quant import Quantised

Result = Output | tuple[Output, torch.Tensor]
Scales = tuple[torch.Tensor, torch.Tensor]


class Prefill:
    """Causal attention of a ragged batch, all keys given: one plan for every layer of a kind in a step."""

    def __init__(
        self, layer: LayerKind, cu_seqlens_q: Sequence[int] | torch.Tensor,
        cu_seqlens_k: Sequence[int] | torch.Tensor | None = None, *, device: torch.device | str,
        lse: str | None = None, backend: str = "auto",
    ) -> None:
        """cu_seqlens_q, cu_seqlens_k: [B + 1] row offsets of the sequences (keys default to the queries' offsets).

        lse: None, "with_sink" or "without_sink". backend: "auto" or a name; BackendUnavailable if it cannot run here
        or cannot honour an argument. AttentionError if offsets do not fit.
        """
        self.layer, self.device, self.lse = layer, checks.as_device(device), lse
        checks.check_lse(lse)
        self._cu_q = checks.offsets("cu_seqlens_q", cu_seqlens_q)
        self._cu_k = self._cu_q if cu_seqlens_k is None else checks.offsets("cu_seqlens_k", cu_seqlens_k)
        if self._cu_q.numel() != self._cu_k.numel():
            raise AttentionError(f"cu_seqlens_q has {self._cu_q.numel()} entries and cu_seqlens_k "
                                 f"{self._cu_k.numel()}; the same number is needed")
        self._rows, self._keys = int(self._cu_q[-1]), int(self._cu_k[-1])
        short = bool((self._cu_q.diff() > self._cu_k.diff()).any())
        self.choice = choose_backend("attention.prefill", backend, layer=layer, device=self.device, lse=lse,
                                     blind_queries=short)
        self._kernel = self.choice.function(layer, self._cu_q, self._cu_k, device=self.device, lse=lse)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *,
        out: Output | None = None,
    ) -> Result:
        """q [Tq, Hq, D], k and v [Tk, Hkv, D], sinks [Hq] bf16 or fp32 in natural-log units, or None.

        out: where to write, [Tq, Hq, D] like q; made if None. Or a Quantised of at least Tq rows of Hq * D columns.
        Returns out, or (out, lse [Tq, Hq] fp32) if the plan was made with an lse. AttentionError names the argument
        that does not fit.
        """
        n, tq, tk = self.layer, self._rows, self._keys
        checks.check_tensor("q", q, (tq, n.num_heads, n.head_dim), n, self.device)
        checks.check_tensor("k", k, (tk, n.num_kv_heads, n.head_dim), n, self.device)
        checks.check_tensor("v", v, (tk, n.num_kv_heads, n.head_dim), n, self.device)
        sinks, out = checks.check_sinks(sinks, n, self.device), _output(out, q, n, self.device)
        return _run(self._kernel, q, k, v, sinks, out) if tq else _empty(out, self)


class PagedPrefill:
    """Causal attention of new queries over a paged cache that already holds their keys (chunked prefill)."""

    def __init__(
        self, layer: LayerKind, cu_seqlens_q: Sequence[int] | torch.Tensor, kv_lens: Sequence[int] | torch.Tensor,
        page_table: torch.Tensor, *, page_size: int, device: torch.device | str, lse: str | None = None,
        backend: str = "auto", kv_dtype: torch.dtype | None = None,
    ) -> None:
        """cu_seqlens_q: [B + 1] row offsets of the new queries. kv_lens: [B] tokens in the cache, the new ones too.

        page_table: int32 [B, pages]; token t of sequence b lies in row t % page_size of page page_table[b, t //
        page_size]. Errors as in Prefill.
        kv_dtype: of the pages; None is the layer's dtype. torch.float8_e4m3fn: what is stored, times a scale per key
        head, is meant, and `run` gets the scales.
        """
        self.kv_dtype = checks.check_kv_dtype(kv_dtype, layer)
        self.layer, self.device, self.lse, self.page_size = layer, checks.as_device(device), lse, page_size
        checks.check_lse(lse)
        self._cu_q = checks.offsets("cu_seqlens_q", cu_seqlens_q)
        lens = checks.lengths("kv_lens", kv_lens)
        if lens.numel() + 1 != self._cu_q.numel():
            raise AttentionError(f"kv_lens has {lens.numel()} sequences and cu_seqlens_q {self._cu_q.numel() - 1}; "
                                 "the same number is needed")
        checks.check_pages(layer, lens, page_table, page_size)
        self._rows = int(self._cu_q[-1])
        short = bool((self._cu_q.diff() > lens).any())
        self.choice = choose_backend("attention.paged_prefill", backend, layer=layer, device=self.device, lse=lse,
                                     page_size=page_size, blind_queries=short, kv_dtype=self.kv_dtype)
        self._kernel = self.choice.function(layer, self._cu_q, lens, page_table, page_size=page_size,
                                            device=self.device, lse=lse)

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None, *,
        out: Output | None = None, scales: Scales | None = None,
    ) -> Result:
        """q [Tq, Hq, D], k_pages and v_pages [pages, page_size, Hkv, D], sinks [Hq] or None. Returns as Prefill.run.

        scales: of e4m3 pages, (keys', values') positive fp32 [Hkv]; None for others.
        """
        n, tq = self.layer, self._rows
        checks.check_tensor("q", q, (tq, n.num_heads, n.head_dim), n, self.device)
        _check_cache(k_pages, v_pages, self.page_size, n, self.device, self.kv_dtype, scales)
        sinks, out = checks.check_sinks(sinks, n, self.device), _output(out, q, n, self.device)
        return _run(self._kernel, q, k_pages, v_pages, sinks, out, scales) if tq else _empty(out, self)


class PagedDecode:
    """One new token for each of a fixed number of sequences over a paged cache. Made once, stepped, run per layer.

    `step` is the host's share and goes outside a CUDA graph; `run` may be captured in one and replayed after later
    steps, since lengths and page table live in buffers of this object that `step` overwrites.
    """

    def __init__(
        self, layer: LayerKind, *, batch: int, max_kv_len: int, page_size: int, device: torch.device | str,
        lse: str | None = None, backend: str = "auto", kv_dtype: torch.dtype | None = None,
    ) -> None:
        """batch: sequences per step, fixed. max_kv_len: the most tokens of a sequence. kv_dtype: as in PagedPrefill.
        Errors as in Prefill."""
        if batch < 1 or max_kv_len < 1 or page_size < 1:
            raise AttentionError(f"batch, max_kv_len and page_size are {batch}, {max_kv_len} and {page_size}; "
                                 "each must be at least 1")
        checks.check_lse(lse)
        self.layer, self.device, self.lse, self.page_size = layer, checks.as_device(device), lse, page_size
        self.batch, self.max_kv_len, self.kv_dtype = batch, max_kv_len, checks.check_kv_dtype(kv_dtype, layer)
        pages = -(-max_kv_len // page_size)
        self.kv_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.page_table = torch.zeros(batch, pages, dtype=torch.int32, device=self.device)
        self.choice = choose_backend("attention.paged_decode", backend, batch, layer=layer, device=self.device,
                                     lse=lse, page_size=page_size, kv_dtype=self.kv_dtype)
        self._kernel = self.choice.function(layer, self.kv_lens, self.page_table, page_size=page_size, lse=lse)

    def step(self, kv_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Set this step's lengths [batch] (the new token included) and page table [batch, pages], both int32.

        Tensors on the CPU are checked (AttentionError); on the GPU they are trusted, so that nothing waits for them.
        """
        if page_table.shape[0] != self.batch or page_table.shape[-1] > self.page_table.shape[1]:
            raise AttentionError(f"page_table has shape {tuple(page_table.shape)}; [{self.batch}, at most "
                                 f"{self.page_table.shape[1]}] is needed")
        if tuple(kv_lens.shape) != (self.batch,):
            raise AttentionError(f"kv_lens has shape {tuple(kv_lens.shape)}; [{self.batch}] is needed")
        if kv_lens.device.type == "cpu":
            checks.check_pages(self.layer, checks.lengths("kv_lens", kv_lens), page_table, self.page_size)
        self.kv_lens.copy_(kv_lens, non_blocking=True)
        self.page_table[:, : page_table.shape[1]].copy_(page_table, non_blocking=True)
        self._kernel.step(kv_lens, page_table)

    def run(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None, *,
        out: Output | None = None, scales: Scales | None = None,
    ) -> Result:
        """q [batch, Hq, D], k_pages and v_pages [pages, page_size, Hkv, D], sinks [Hq] or None. Returns as Prefill.run.

        The new token's own key must already be in the cache. scales: as in PagedPrefill.run; a captured run reads them
        where they lie.
        """
        n = self.layer
        checks.check_tensor("q", q, (self.batch, n.num_heads, n.head_dim), n, self.device)
        _check_cache(k_pages, v_pages, self.page_size, n, self.device, self.kv_dtype, scales)
        sinks, out = checks.check_sinks(sinks, n, self.device), _output(out, q, n, self.device)
        return _run(self._kernel, q, k_pages, v_pages, sinks, out, scales)


def prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *,
    cu_seqlens_q: Sequence[int] | torch.Tensor, cu_seqlens_k: Sequence[int] | torch.Tensor | None = None,
    window: int | None = None, scale: float | None = None, lse: str | None = None, backend: str = "auto",
    out: Output | None = None,
) -> Result:
    """Prefill, planned and run in one call; see Prefill for shapes and errors."""
    plan = Prefill(checks.layer_of(q, k, window, scale), cu_seqlens_q, cu_seqlens_k, device=q.device, lse=lse,
                   backend=backend)
    return plan.run(q, k, v, sinks, out=out)


def paged_prefill(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None, *,
    cu_seqlens_q: Sequence[int] | torch.Tensor, kv_lens: Sequence[int] | torch.Tensor, page_table: torch.Tensor,
    window: int | None = None, scale: float | None = None, lse: str | None = None, backend: str = "auto",
    out: Output | None = None, scales: Scales | None = None,
) -> Result:
    """PagedPrefill, planned and run in one call; page size and dtype of the pages are k_pages'."""
    plan = PagedPrefill(checks.layer_of(q, k_pages, window, scale), cu_seqlens_q, kv_lens, page_table,
                        page_size=k_pages.shape[1], device=q.device, lse=lse, backend=backend, kv_dtype=k_pages.dtype)
    return plan.run(q, k_pages, v_pages, sinks, out=out, scales=scales)


def paged_decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None, *,
    kv_lens: torch.Tensor, page_table: torch.Tensor, window: int | None = None, scale: float | None = None,
    lse: str | None = None, backend: str = "auto", out: Output | None = None, scales: Scales | None = None,
) -> Result:
    """PagedDecode, made, stepped and run in one call; page size and dtype of the pages are k_pages'."""
    page_size = k_pages.shape[1]
    plan = PagedDecode(checks.layer_of(q, k_pages, window, scale), batch=q.shape[0],
                       max_kv_len=max(1, page_table.shape[-1] * page_size), page_size=page_size, device=q.device,
                       lse=lse, backend=backend, kv_dtype=k_pages.dtype)
    plan.step(kv_lens, page_table)
    return plan.run(q, k_pages, v_pages, sinks, out=out, scales=scales)


def _output(out: Output | None, q: torch.Tensor, layer: LayerKind, device: torch.device) -> Output:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if isinstance(out, Quantised):
        check_quantised(out, q.shape[0], layer, device)
    else:
        checks.check_tensor("out", out, q.shape, layer, device)
    return out


def _run(
    kernel: Callable[..., Result], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, out: Output,
    scales: Scales | None = None,
) -> Result:
    """What the kernel gives. One without e4m3 output of its own writes rows of q's dtype, which are quantised next."""
    more = () if scales is None else (scales,)
    if not isinstance(out, Quantised) or getattr(kernel, "quantises", False):
        return kernel(q, k, v, sinks, out, *more)
    result = kernel(q, k, v, sinks, torch.empty(q.shape, dtype=q.dtype, device=q.device), *more)
    rows, lse = result if isinstance(result, tuple) else (result, None)
    quantise_rows(rows, out)
    return out if lse is None else (out, lse)


def _empty(out: Output, plan: Prefill | PagedPrefill) -> Result:
    return out if plan.lse is None else (out, torch.empty(0, plan.layer.num_heads, device=plan.device))


def _check_cache(
    k: torch.Tensor, v: torch.Tensor, page_size: int, layer: LayerKind, device: torch.device, kv_dtype: torch.dtype,
    scales: Scales | None,
) -> None:
    for name, pages in (("k_pages", k), ("v_pages", v)):
        checks.check_tensor(name, pages, (-1, page_size, layer.num_kv_heads, layer.head_dim), layer, device, kv_dtype)
    checks.check_scales(scales, kv_dtype, layer, device)
    if k.shape != v.shape:
        raise AttentionError(f"k_pages has shape {tuple(k.shape)} and v_pages {tuple(v.shape)}; the same is needed")
