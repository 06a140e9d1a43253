"""One stored weight into another form: the parts to write, and what it did to the values.

A part is named by what is put behind the weight's name in the file: `_blocks` and `_scales` for MXFP4, `.weight` and
`.weight_scale_inv` for FP8, `.weight` (or nothing, for experts in the order in_out) for bf16. Values go through fp32
only where they must be rounded, a strip of rows at a time.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch

from gptoss_lab.checkpoint import fp8, mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.report import Report, RoundingReport
from gptoss_lab.checkpoint.stored import Fp8, Mxfp4, Stored

Parts = dict[str, torch.Tensor]
_STRIP = fp8.BLOCK          # rows that go through fp32 at a time


def to_fp8(stored: Stored, scales: str, where: str) -> tuple[Parts, Report]:
    """FP8 blocks. MXFP4 with "pow2" scales goes by table and is proven exact per block; anything else is rounded and
    measured.
    """
    if isinstance(stored, Mxfp4) and scales == "pow2":
        weight, scale_inv, report = fp8.from_mxfp4(stored.blocks, stored.scales, where)
    elif isinstance(stored, Fp8):
        raise CheckpointError(f"{where} is FP8 already")
    else:
        weight, scale_inv, report = fp8.quantise(stored.dequantise(torch.float32), scales, where)
    return {".weight": weight, ".weight_scale_inv": scale_inv}, report


def to_bf16(stored: Stored, order: str, suffix: str, where: str) -> tuple[Parts, Report]:
    """Dense bf16 as [..., out, in] ("out_in") or [..., in, out] ("in_out")."""
    report = RoundingReport()
    if isinstance(stored, Mxfp4):
        weight = mxfp4.decode(stored.blocks, stored.scales, torch.bfloat16, where)
    else:
        weight = stored.dequantise(torch.bfloat16)
    if isinstance(stored, Fp8):
        for strip, rows in _strips(stored):
            report.measure(strip, weight[..., rows, :])
    return {suffix: weight if order == "out_in" else weight.transpose(-1, -2).contiguous()}, report


def to_mxfp4(stored: Stored, where: str) -> tuple[Parts, Report]:
    """MXFP4. From FP8 or bf16 that came from MXFP4 the values come back exactly, the bytes if the encoding was
    canonical.
    """
    if isinstance(stored, Mxfp4):
        raise CheckpointError(f"{where} is MXFP4 already")
    report = RoundingReport()
    *lead, rows, columns = stored.shape
    device = stored.weight.device
    blocks = torch.empty((*lead, rows, columns // mxfp4.GROUP, mxfp4.GROUP // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((*lead, rows, columns // mxfp4.GROUP), dtype=torch.uint8, device=device)
    for strip, at in _strips(stored):
        blocks[..., at, :, :], scales[..., at, :] = mxfp4.encode(strip, where)
        report.measure(strip, mxfp4.decode(blocks[..., at, :, :], scales[..., at, :]))
    return {"_blocks": blocks, "_scales": scales}, report


def _strips(stored: Stored) -> Iterator[tuple[torch.Tensor, slice]]:
    """(values [..., n, in] in fp32, which rows) for the whole weight."""
    rows = stored.shape[-2]
    for start in range(0, rows, _STRIP):
        at = slice(start, min(rows, start + _STRIP))
        yield stored.slice_rows(at.start, at.stop).dequantise(torch.float32), at
