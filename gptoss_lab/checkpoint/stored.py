"""Weights in the form in which they lie on disk: MXFP4, FP8 blocks or dense, cut and decoded in the same words.

A model or a sharding rule asks for `slice_rows`, `slice_columns`, `to` and `dequantise` and need not know the form.
Cutting is lazy on memory-mapped data: only what is later copied or decoded is read. A cut through an FP8 block keeps
the whole block's scale and remembers where inside the block it starts, so a slice decodes to exactly the slice of the
whole.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from gptoss_lab.checkpoint import fp8, mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Mxfp4:
    """blocks [..., out, in / 32, 16] uint8 and scales [..., out, in / 32] uint8."""

    blocks: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        *lead, groups = self.scales.shape
        return (*lead, groups * mxfp4.GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes of blocks and scales."""
        return self.blocks.nbytes + self.scales.nbytes

    def slice_rows(self, start: int, stop: int) -> Mxfp4:
        """Output rows start..stop-1."""
        _check_range("rows", start, stop, self.shape[-2])
        return Mxfp4(self.blocks[..., start:stop, :, :], self.scales[..., start:stop, :])

    def slice_columns(self, start: int, stop: int) -> Mxfp4:
        """Input columns start..stop-1; both multiples of 32, since a scale belongs to 32 columns."""
        _check_range("columns", start, stop, self.shape[-1])
        if start % mxfp4.GROUP or stop % mxfp4.GROUP:
            raise CheckpointError(f"columns {start}..{stop} cut a group; multiples of {mxfp4.GROUP} are expected")
        groups = slice(start // mxfp4.GROUP, stop // mxfp4.GROUP)
        return Mxfp4(self.blocks[..., groups, :], self.scales[..., groups])

    def to(self, device: torch.device | str) -> Mxfp4:
        """The same on another device."""
        return Mxfp4(self.blocks.to(device), self.scales.to(device))

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., out, in] in fp32 or bf16, exact."""
        return mxfp4.decode(self.blocks, self.scales, dtype)


@dataclass(frozen=True)
class Fp8:
    """weight [..., out, in] float8_e4m3fn and scale_inv fp32, one per 128x128 block that the weight touches.

    first_row, first_column: where inside its block the first row and column of `weight` lie (0 unless cut there).
    """

    weight: torch.Tensor
    scale_inv: torch.Tensor
    first_row: int = 0
    first_column: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of weight and scales."""
        return self.weight.nbytes + self.scale_inv.nbytes

    def slice_rows(self, start: int, stop: int) -> Fp8:
        """Output rows start..stop-1, with the scales of every block that they touch."""
        _check_range("rows", start, stop, self.shape[-2])
        first, last, inside = _blocks(start + self.first_row, stop + self.first_row)
        return replace(
            self, weight=self.weight[..., start:stop, :], scale_inv=self.scale_inv[..., first:last, :], first_row=inside
        )

    def slice_columns(self, start: int, stop: int) -> Fp8:
        """Input columns start..stop-1, with the scales of every block that they touch."""
        _check_range("columns", start, stop, self.shape[-1])
        first, last, inside = _blocks(start + self.first_column, stop + self.first_column)
        return replace(
            self, weight=self.weight[..., start:stop], scale_inv=self.scale_inv[..., first:last], first_column=inside
        )

    def to(self, device: torch.device | str) -> Fp8:
        """The same on another device."""
        return replace(self, weight=self.weight.to(device), scale_inv=self.scale_inv.to(device))

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., out, in] in `dtype`: the product of value and scale in fp32, rounded once (not at all for 2^k
        scales).
        """
        return fp8.dequantise(self.weight, self.scale_inv, dtype, self.first_row, self.first_column)


@dataclass(frozen=True)
class Dense:
    """A plain weight. order "out_in": [..., out, in]. order "in_out": [..., in, out], as transformers holds experts."""

    weight: torch.Tensor
    order: str = "out_in"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in], whatever the order in memory."""
        return tuple(self.out_in().shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.weight.nbytes

    def out_in(self) -> torch.Tensor:
        """The weight as [..., out, in]: a view, transposed where the order is "in_out"."""
        return self.weight if self.order == "out_in" else self.weight.transpose(-1, -2)

    def slice_rows(self, start: int, stop: int) -> Dense:
        """Output rows start..stop-1."""
        _check_range("rows", start, stop, self.shape[-2])
        cut = self.weight[..., start:stop, :] if self.order == "out_in" else self.weight[..., start:stop]
        return Dense(cut, self.order)

    def slice_columns(self, start: int, stop: int) -> Dense:
        """Input columns start..stop-1."""
        _check_range("columns", start, stop, self.shape[-1])
        cut = self.weight[..., start:stop] if self.order == "out_in" else self.weight[..., start:stop, :]
        return Dense(cut, self.order)

    def to(self, device: torch.device | str) -> Dense:
        """The same on another device."""
        return Dense(self.weight.to(device), self.order)

    def dequantise(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """[..., out, in] in `dtype`."""
        return self.out_in().to(dtype)


Stored = Mxfp4 | Fp8 | Dense


def split_gate_up(tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of a gate_up tensor along its output axis: even indices are gate, odd ones up (weights and bias
    alike).
    """
    if tensor.shape[axis] % 2:
        raise CheckpointError(f"axis {axis} of {list(tensor.shape)} is odd; gate and up rows alternate in pairs")
    pairs = tensor.unflatten(axis, (tensor.shape[axis] // 2, 2))
    at = axis + 1 if axis >= 0 else axis
    return pairs.select(at, 0), pairs.select(at, 1)


def _blocks(start: int, stop: int) -> tuple[int, int, int]:
    """First block, one past the last block, and the offset inside the first, of positions start..stop-1."""
    first = start // fp8.BLOCK
    return first, max(first, -(-stop // fp8.BLOCK)), start % fp8.BLOCK


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise CheckpointError(f"{what} {start}..{stop} do not lie within 0..{size}")
