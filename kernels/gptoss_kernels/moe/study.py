"""Pure functions behind two questions: how does a GEMM without a bias get one, and what does precision do to routing?

A bias can be added in a second pass over the output, ride in extra columns of K (ones in the activations, the bias in
the weights), or start the accumulator. The second pass costs a read and a write of the output and a second rounding;
the columns cost a K block and quantise the bias; the accumulator costs the bias itself. Everything here is plain torch.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch

from gptoss_kernels.reference.moe import route

E4M3_MAX = 448.0


def bias_in_second_pass(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[R, N] fp32 product stored as bf16, read again, bias [N] added, stored again: two roundings."""
    return (product.bfloat16().float() + bias).bfloat16()


def bias_in_accumulator(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[R, N] fp32 sums that started from the bias [N], stored as bf16 once."""
    return (product + bias).bfloat16()


def bias_as_columns(bias: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bias as `columns` extra e4m3 weight columns, each holding what the ones before left over.

    bias: [N] fp32. Returns values [N, columns] float8_e4m3fn and scale [ceil(N / 128), columns] fp32, one per 128 rows
    and column (as if each column had a scale block of its own). With ones in the activations their product adds
    sum_c values * scale.
    """
    if columns < 1:
        raise ValueError(f"bias_as_columns: {columns} columns; at least one is needed")
    n = bias.shape[0]
    blocks = -(-n // 128)
    left = torch.nn.functional.pad(bias.float(), (0, blocks * 128 - n)).view(blocks, 128)
    values, scales = [], []
    for _ in range(columns):
        amax = left.abs().amax(dim=1, keepdim=True)
        scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
        q = (left / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        left = left - q.float() * scale
        values.append(q.view(torch.uint8).flatten()[:n])
        scales.append(scale[:, 0])
    return torch.stack(values, dim=1).view(torch.float8_e4m3fn), torch.stack(scales, dim=1)


def bias_from_columns(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N] fp32: what the columns of `bias_as_columns` add up to."""
    return (values.float() * scale.repeat_interleave(128, dim=0)[: values.shape[0]]).sum(dim=1)


def bias_bytes(rows: int, n: int, experts: int) -> dict[str, int]:
    """Extra bytes moved by each way, for `rows` output rows of n and `experts` biases of n: fp32 bias, bf16 output.

    "extra columns" counts one K block of 128 e4m3 columns in both operands, with its scales.
    """
    biases = 4 * experts * n
    columns = 128 * (rows + experts * n) + 4 * (rows + experts * -(-n // 128))
    return {"second pass": biases + 4 * rows * n, "extra columns": columns, "accumulator": biases}


def block_waste(size: int, block: int) -> float:
    """Share of work beyond `size` when an axis is cut into whole blocks: 2880 in blocks of 128 is 23 / 22.5 - 1."""
    if size < 1 or block < 1:
        raise ValueError(f"block_waste: an axis of {size} in blocks of {block}; both must be positive")
    return -(-size // block) * block / size - 1


@dataclass(frozen=True)
class RoutingChange:
    """Against fp64: share of tokens whose set of experts differs, and the largest error of a weight elsewhere."""

    sets_changed: float
    weight_error: float


def routing_change(
    logits: torch.Tensor,
    experts_per_token: int,
    *,
    logits_dtype: torch.dtype = torch.float32,
    softmax_dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype = torch.float32,
) -> RoutingChange:
    """Route with logits, softmax and weights rounded to these dtypes, and compare with fp64 throughout.

    logits: [T, E] float64. softmax_dtype: the precision in which the softmax over the selected logits is taken.
    """
    exact_ids, exact = route(logits.double(), experts_per_token, torch.float64)
    rounded = logits.to(logits_dtype)
    ids, _ = route(rounded, experts_per_token)
    weights = torch.softmax(rounded.gather(-1, ids).to(softmax_dtype), dim=-1).to(weight_dtype).double()
    ours, order = ids.sort(dim=-1)
    theirs, exact_order = exact_ids.sort(dim=-1)
    same = (ours == theirs).all(dim=-1)
    error = (weights.gather(-1, order) - exact.gather(-1, exact_order)).abs()[same]
    return RoutingChange(1.0 - same.double().mean().item(), error.max().item() if error.numel() else 0.0)
