"""Launch shapes to compare: one as for hidden size 7168, the chosen one for 2880, and neighbours.

The post found kernels whose grids and blocks had been chosen for a hidden size of 7168 and chose them again for 2880.
Nothing here is made bad on purpose; "as for 7168" is one of three things, and each says which:

    a rule of this project asked for 7168     how many weight rows a program of a decode product owns (few_config); how
                                              a row is held while it is normed or quantised (norm_quantise_config,
                                              norm_residual_config)
    the widest even tile                      256 columns divide 7168 and the 4096 of DeepSeek-V3's gate and up; 192 is
                                              the widest that divides 2880 and 5760
    a program that holds a row                the next power of two: 8192 for 7168, 4096 for 2880

A kernel for 7168 may also count on whole blocks of 128 along K; 2880 = 22.5 blocks then becomes 2944 by padding.
Attention never sees the hidden size. What is chosen there is for heads of 64 and not of 128, and for a window, and for
how many programs share a decode; those are compared the same way, under their own names.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gptoss_kernels.attention.layer import LayerKind
from gptoss_kernels.attention.triton_backend import DECODE_PROGRAMS, decode_config, prefill_config
from gptoss_kernels.moe.combine import combine_config
from gptoss_kernels.moe.gemm_cuda import CHOSEN_COLUMNS
from gptoss_kernels.projection.few import few_config
from gptoss_kernels.projection.norm import norm_residual_config
from gptoss_kernels.quant.norm_quant import norm_quantise_config

THEIRS, OURS, NEITHER = "as for 7168", "for 2880", "neither"
HEADS, KV_HEADS, WINDOW, SMS = 64, 8, 128, 132


@dataclass(frozen=True)
class Launch:
    """One way to launch a kernel. made_for: what it suits, for example "as for 7168". chosen: what the
    kernel's own rule gives for 2880, whether or not a served step takes this kernel."""

    name: str
    made_for: str
    options: Mapping[str, Any] = field(hash=False)
    chosen: bool = False


@dataclass(frozen=True)
class Case:
    """kernel: one of KERNELS. tokens: of the step, or at which `batch` sequences decode. experts: 0 if dense; rows that
    are quantised for experts are written to four places each, others to one."""

    kernel: str
    tokens: int
    experts: int = 0
    batch: int = 1

    @property
    def name(self) -> str:
        """For example "tune: down product/E128/T8192" or "tune: decode attention/T8192/batch8"."""
        parts = [f"E{self.experts}"] if self.experts else []
        parts += [f"T{self.tokens}", *([f"batch{self.batch}"] if self.kernel == "decode attention" else [])]
        return "/".join([f"tune: {self.kernel}", *parts])


PRODUCTS = ("gate/up product", "down product", "QKV product", "output product")
ROWS = ("norm and quantise", "norm and residual", "combine")
FEW = ("few-token QKV", "few-token output")
ATTENTION = ("window attention", "decode attention")
KERNELS = (*PRODUCTS, *ROWS, *FEW, *ATTENTION)
CASES = (
    *(Case(kernel, 8192, experts) for experts in (128, 32) for kernel in PRODUCTS[:2]),
    *(Case(kernel, 8192) for kernel in PRODUCTS[2:]),
    *(Case(kernel, 8192, experts) for kernel, experts in zip((ROWS[0], *ROWS), (128, 0, 0, 128), strict=True)),
    *(Case(kernel, tokens) for kernel in FEW for tokens in (1, 8, 32)),
    Case("window attention", 8192),
    *(Case("decode attention", 8192, batch=batch) for batch in (1, 8, 32)),
)


def launches(case: Case) -> tuple[Launch, ...]:
    """The ways to launch the kernel of a case; exactly one is chosen. ValueError for a kernel that is not there."""
    if case.kernel in PRODUCTS:
        return _products(case.kernel)
    if case.kernel in ROWS:
        return _rows(case)
    if case.kernel in FEW:
        return _few(case)
    if case.kernel in ATTENTION:
        return _window() if case.kernel == "window attention" else _decode()
    raise ValueError(f"kernel is {case.kernel!r}; one of {', '.join(KERNELS)}")


def chosen(case: Case) -> Launch:
    """The launch of a case that the kernel's own rule gives."""
    return next(launch for launch in launches(case) if launch.chosen)


def _products(kernel: str) -> tuple[Launch, ...]:
    padded = Launch("256 columns, axes padded to 2944", THEIRS, {"columns": 256, "padded": True})
    if kernel == "gate/up product":             # its tile is 256 columns, one scale group of what SwiGLU leaves
        return padded, Launch("256 columns, half a block skipped", OURS, {"columns": 256, "padded": False}, True)
    wide = Launch("256 columns", THEIRS, {"columns": 256, "padded": False})
    chosen = Launch(f"{CHOSEN_COLUMNS} columns", OURS, {"columns": CHOSEN_COLUMNS, "padded": False}, True)
    narrow = Launch("128 columns", NEITHER, {"columns": 128, "padded": False})
    return (*([padded] if kernel == "down product" else []), wide, chosen, narrow)


def _rows(case: Case) -> tuple[Launch, ...]:
    """How a program holds a row, or a part of one; what is chosen is what the kernel's own rule gives for 2880."""
    if case.kernel == "norm and quantise":
        def rule(h: int) -> dict[str, int]:
            return norm_quantise_config(case.tokens, h, placed=case.experts > 0)

        theirs, ours, others = rule(7168), rule(2880), [{"GROUPS": 32, "num_warps": warps} for warps in (4, 8)]
    elif case.kernel == "norm and residual":
        theirs, ours = norm_residual_config(7168), norm_residual_config(2880)
        others = [{"H_PAD": 4096, "num_warps": 4}]
    else:
        theirs, ours = {"BLOCK_H": 8192, "num_warps": 8}, combine_config(case.tokens, 2880)
        others = [{"BLOCK_H": block, "num_warps": 4} for block in (1024, 512)]
    return (Launch(_row_name(theirs), THEIRS, theirs), Launch(_row_name(ours), OURS, ours, True),
            *(Launch(_row_name(one), NEITHER, one) for one in others if one != ours))


def _row_name(options: Mapping[str, int]) -> str:
    """For example "1024 lanes, 2 warps": columns that a program holds at once. A group has 128."""
    lanes = next(options[name] * each for name, each in (("GROUPS", 128), ("H_PAD", 1), ("BLOCK_H", 1))
                 if name in options)
    return f"{lanes} lanes, {options['num_warps']} warps"


def _few(case: Case) -> tuple[Launch, ...]:
    def launch(made_for: str, n: int) -> Launch:
        options = few_config(case.tokens, n, True)
        return Launch(f"{options['BLOCK_N']} rows of the weight", made_for, options, made_for == OURS)

    if case.kernel == "few-token output":
        return launch(THEIRS, 7168), launch(OURS, 2880)
    return launch(OURS, 5120), launch(NEITHER, 2880)


def _window() -> tuple[Launch, ...]:
    def kind(head_dim: int, window: int | None) -> LayerKind:
        return LayerKind(HEADS, KV_HEADS, head_dim, torch.bfloat16, window)

    full, wide = prefill_config(kind(64, None)), prefill_config(kind(128, None))
    return (
        Launch("as a full layer of heads of 128", "as for heads of 128", wide),
        Launch("as a full layer of heads of 64", "as for a full layer", full),
        Launch("as a window of 128", "for a window of 128", prefill_config(kind(64, WINDOW)), True),
    )


def _decode() -> tuple[Launch, ...]:
    def config(head_dim: int) -> dict[str, int]:
        return decode_config(LayerKind(HEADS, KV_HEADS, head_dim, torch.bfloat16, None))

    def launch(programs: int, head_dim: int, made_for: str, chosen: bool = False) -> Launch:
        return Launch(f"{programs} programs, blocks for heads of {head_dim}", made_for,
                      {"programs": programs, "config": config(head_dim)}, chosen)

    return (launch(SMS, 64, "one program on each SM"), launch(DECODE_PROGRAMS, 128, "as for heads of 128"),
            launch(DECODE_PROGRAMS, 64, "for heads of 64", True))
