"""The own Triton kernels as backends: tile sizes, launches, workspaces.

Tile sizes were chosen from the compiler's register reports and one tuning run on an H200 (head_dim 64, bf16); other
head sizes only change how many keys fit a block.
"""
from __future__ import annotations

import torch

from gptoss_kernels.attention.backends import register_plan, triton_obstacle
from gptoss_kernels.attention.layer import AttentionError, LayerKind
from gptoss_kernels.attention.quantised import places, whole_groups
from gptoss_kernels.upload import upload

LOG2E = 1.4426950408889634


def _precision(layer: LayerKind) -> str:
    return "ieee" if layer.dtype == torch.float32 else "tf32"   # the word only matters for fp32 operands


def prefill_config(layer: LayerKind) -> dict[str, int]:
    """Block sizes and launch options of the prefill kernel for a kind of layer."""
    from gptoss_kernels.attention.triton_prefill import next_power_of_two

    group_rows = next_power_of_two(layer.group)
    wide = layer.head_dim > 64 or layer.dtype == torch.float32               # more bytes a row: smaller blocks
    if layer.window is None:
        block_m, block_n = (64, 32) if wide else (128, 64)
        config = {"BLOCK_N": block_n, "TAIL_N": block_n, "num_warps": 4 if wide else 8, "num_stages": 2 if wide else 3}
    else:
        block_m, block_n = 64, 32 if layer.window >= 32 else 16
        config = {"BLOCK_N": block_n, "TAIL_N": 16, "num_warps": 4, "num_stages": 2}
    return {"GROUP_ROWS": group_rows, "BLOCK_M": max(block_m, group_rows), **config}


class _TilePrefill:
    """What the ragged and the paged plan share: the tile table on the device and the launch.

    config: block sizes and launch options other than `prefill_config`'s, to compare them.
    """

    def __init__(
        self, layer: LayerKind, cu_q: torch.Tensor, k_lens: torch.Tensor, k_begin: torch.Tensor, device,
        lse: str | None, config: dict[str, int] | None = None,
    ) -> None:
        from gptoss_kernels.attention.triton_prefill import tile_table

        self._layer, self._lse, self._config = layer, lse, config or prefill_config(layer)
        self.quantises = whole_groups(layer)
        queries = self._config["BLOCK_M"] // self._config["GROUP_ROWS"]
        self._tiles = upload(tile_table(cu_q, k_lens, k_begin, queries), device)

    def _launch(self, q, k, v, sinks, out, table, page_size, scales=None):
        from gptoss_kernels.attention.triton_prefill import INTERPRETED, prefill_kernel

        n = self._layer
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._lse else None
        rows, out_scales, strides = places(out, n.num_heads)
        prefill_kernel[(self._tiles.shape[0], n.num_kv_heads)](
            q, k, v, sinks, rows, rows if lse is None else lse, self._tiles, table,
            *(scales or (sinks, sinks)), n.window or 0, n.softmax_scale * LOG2E,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), rows.stride(0),
            rows.stride(1), table.stride(0), out_scales, *strides,
            NUM_HEADS=n.num_heads, GROUP=n.group, HEAD_DIM=n.head_dim, WINDOWED=n.window is not None,
            PAGED=page_size > 0, PAGE_SIZE=page_size, SINK_FIRST=self._lse != "without_sink", LSE=lse is not None,
            E4M3=scales is not None, QUANTISE=out_scales is not None, PRECISION=_precision(n), INTERPRET=INTERPRETED,
            **self._config,
        )
        return out if lse is None else (out, lse)


@register_plan("attention.prefill", "triton", triton_obstacle)
class TritonPrefill(_TilePrefill):
    """Ragged prefill with the own kernel."""

    def __init__(
        self, layer: LayerKind, cu_q: torch.Tensor, cu_k: torch.Tensor, *, device, lse: str | None,
        config: dict[str, int] | None = None,
    ) -> None:
        super().__init__(layer, cu_q, cu_k.diff(), cu_k[:-1], device, lse, config)

    def __call__(self, q, k, v, sinks, out):
        return self._launch(q, k, v, sinks, out, self._tiles, 0)


@register_plan("attention.paged_prefill", "triton", triton_obstacle)
class TritonPagedPrefill(_TilePrefill):
    """Prefill over a paged cache with the own kernel; pages must follow each other at even distances."""

    def __init__(self, layer, cu_q, kv_lens, page_table, *, page_size: int, device, lse: str | None) -> None:
        super().__init__(layer, cu_q, kv_lens, torch.zeros_like(kv_lens), device, lse)
        self._page_size = page_size
        self._table = upload(page_table, device).contiguous()

    def __call__(self, q, k_pages, v_pages, sinks, out, scales=None):
        k, v = (_as_rows(name, pages) for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)))
        return self._launch(q, k, v, sinks, out, self._table, self._page_size, scales)


def _as_rows(name: str, pages: torch.Tensor) -> torch.Tensor:
    """[pages, page_size, heads, D] as [pages * page_size, heads, D] without a copy."""
    if pages.stride(0) != pages.shape[1] * pages.stride(1):
        raise AttentionError(f"{name} has strides {pages.stride()}; pages that follow each other, each "
                             f"{pages.shape[1]} token strides long, are needed")
    return pages.view(-1, *pages.shape[2:])


def decode_config(layer: LayerKind) -> dict[str, int]:
    """Block size and launch options of the decode kernel for a kind of layer."""
    if layer.head_dim > 64 or layer.dtype == torch.float32:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    # Page ids and keys: two levels share the stages. LATE: see the kernel's file.
    return {"BLOCK_N": 64, "num_warps": 2, "num_stages": 7, "LATE": True}


DECODE_PROGRAMS = 528           # four programs fit each of an H200's 132 multiprocessors: all run in one wave


@register_plan("attention.paged_decode", "triton", triton_obstacle)
class TritonPagedDecode:
    """Split-KV decode with the own kernels. The grid depends on the capacity alone, so a run can be captured.

    programs, config: a grid and launch options other than the chosen ones, to compare them.
    """

    def __init__(
        self, layer, kv_lens, page_table, *, page_size: int, lse: str | None, programs: int = DECODE_PROGRAMS,
        config: dict[str, int] | None = None,
    ) -> None:
        from gptoss_kernels.attention.triton_decode import split_count

        self._layer, self._lens, self._table = layer, kv_lens, page_table
        self._page_size, self._lse = page_size, lse
        batch, n = kv_lens.numel(), layer
        keys = page_table.shape[1] * page_size
        self._config = config or decode_config(layer)
        blocks = 1 if n.window is not None else -(-keys // self._config["BLOCK_N"])  # a window is too short to split
        self.splits = split_count(batch, n.num_kv_heads, blocks, programs)
        parts = batch * n.num_heads * (self.splits if self.splits > 1 else 0)
        self._part_out = kv_lens.new_empty((parts, n.head_dim), dtype=torch.float32)
        self._part_m = kv_lens.new_empty(parts, dtype=torch.float32)
        self._part_den = kv_lens.new_empty(parts, dtype=torch.float32)

    def step(self, kv_lens: torch.Tensor, page_table: torch.Tensor) -> None:
        """Nothing to prepare: the kernels read the plan's buffers on the device."""

    def __call__(self, q, k_pages, v_pages, sinks, out, scales=None):
        from gptoss_kernels.attention.triton_decode import decode_kernel, merge_kernel
        from gptoss_kernels.attention.triton_prefill import INTERPRETED, next_power_of_two
        from gptoss_kernels.overlap import OVERLAPPING

        n, batch = self._layer, self._lens.numel()
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._lse else None
        shared = {"NUM_HEADS": n.num_heads, "HEAD_DIM": n.head_dim, "SPLITS": self.splits,
                  "WINDOWED": n.window is not None, "SINK_FIRST": self._lse != "without_sink", "LSE": lse is not None}
        decode_kernel[(self.splits, n.num_kv_heads, batch)](
            q, k_pages, v_pages, sinks, out, out if lse is None else lse, self._part_out, self._part_m, self._part_den,
            self._lens, self._table, *(scales or (sinks, sinks)), n.window or 0, n.softmax_scale * LOG2E,
            q.stride(0), q.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3], out.stride(0), out.stride(1),
            self._table.stride(0), GROUP=n.group, ROWS=max(16, next_power_of_two(n.group)),
            PAGE_SIZE=self._page_size, E4M3=scales is not None, PRECISION=_precision(n), INTERPRET=INTERPRETED,
            **shared, **self._config, **OVERLAPPING,
        )
        if self.splits > 1:
            merge_kernel[(n.num_heads, batch)](
                sinks, out, out if lse is None else lse, self._part_out, self._part_m, self._part_den, self._lens,
                n.window or 0, out.stride(0), out.stride(1), BLOCK_N=self._config["BLOCK_N"],
                SPLIT_ROWS=next_power_of_two(self.splits), num_warps=4, **shared, **OVERLAPPING,
            )
        return out if lse is None else (out, lse)
