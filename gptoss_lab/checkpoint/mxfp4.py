"""MXFP4, the form in which gpt-oss stores its experts: 4-bit codes, 32 of which share one power-of-two scale.

A byte of `blocks` holds two consecutive values of the input axis, the earlier one in its low nibble. A nibble is
sign, two bits of exponent, one of mantissa (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, -0 among them); the scale
byte s stands for 2^(s - 127). Decoding looks up (scale byte, code byte) in a table that holds both finished values:
exact in fp32 and bf16, and the same bits on every device. Encoding is the released quantiser's rule, scale
2^ceil(log2(absmax / 6)), nearest value, ties to the even code.

What is lost: decoding nothing. Encoding rounds, unless the values came from MXFP4: then the values come back exactly.
The bytes come back too when the encoding was canonical: every group's largest code is 4 or 6 (0 in a group of zeros
has the scale byte 0). A group whose largest code is smaller could have been written with a smaller scale, and is.
"""
from __future__ import annotations

import functools

import torch

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.lookup import lookup
from gptoss_lab.checkpoint.powers import power_of_two, power_of_two_fp32

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}       # an integer as wide as two values
_STRIP = 1 << 18                                                        # values encoded at a time on the CPU


def decode(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, where: str = "MXFP4 tensor"
) -> torch.Tensor:
    """Values of MXFP4 data.

    blocks: [..., G, 16] uint8. scales: [..., G] uint8. dtype: torch.float32 or torch.bfloat16, both exact. where: the
    name used in errors. Returns [..., 32 G] on the same device. CheckpointError: shapes that do not belong together,
    a scale byte 255 (NaN), or a value beyond the dtype (scale bytes 253 and 254 with large codes).
    """
    check(blocks, scales, where)
    if dtype not in _PAIR:
        raise CheckpointError(f"{where}: MXFP4 decodes to float32 or bfloat16, not {dtype}")
    *lead, groups, _ = blocks.shape
    pairs = torch.empty((scales.numel(), GROUP // 2), dtype=_PAIR[dtype], device=blocks.device)
    lookup(_table(dtype, blocks.device), scales.reshape(len(pairs)), blocks.reshape(pairs.shape), pairs)
    out = pairs.view(dtype).view(*lead, groups * GROUP)
    if scales.numel() and int(scales.max()) >= 253 and not bool(torch.isfinite(out).all()):
        raise CheckpointError(f"{where}: scale byte {int(scales.max())} puts values beyond {dtype}; at most 252 fits")
    return out


def encode(values: torch.Tensor, where: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 of `values`, nearest value, ties to the even code; -0 keeps its sign.

    values: [..., K] float, finite, K a multiple of 32. Returns blocks [..., K / 32, 16] uint8 and scales [..., K / 32]
    uint8. CheckpointError for another K, for NaN and for infinities.
    """
    if not values.shape or values.shape[-1] % GROUP or not values.is_floating_point():
        raise CheckpointError(f"{where}: MXFP4 needs floats with a last axis of a multiple of {GROUP}, "
                              f"not {values.dtype} {list(values.shape)}")
    groups = values.reshape(values.numel() // GROUP, GROUP)
    blocks = torch.empty((len(groups), GROUP // 2), dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(groups), dtype=torch.uint8, device=values.device)
    step = _STRIP // GROUP if values.device.type == "cpu" else max(1, len(groups))
    for start in range(0, len(groups), step):
        stop = start + step
        blocks[start:stop], scales[start:stop] = _encode_groups(groups[start:stop].float(), where)
    shape = (*values.shape[:-1], values.shape[-1] // GROUP)
    return blocks.view(*shape, GROUP // 2), scales.view(shape)


def check(blocks: torch.Tensor, scales: torch.Tensor, where: str = "MXFP4 tensor") -> None:
    """CheckpointError unless blocks [..., G, 16] and scales [..., G] are uint8, belong together and hold no NaN
    scale.
    """
    right = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape[-1:] == (GROUP // 2,)
    if not right or blocks.shape[:-1] != scales.shape:
        raise CheckpointError(f"{where}: blocks {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} "
                              f"{list(scales.shape)} do not belong together; uint8 [..., G, 16], [..., G] are expected")
    check_scales(scales, where)


def check_scales(scales: torch.Tensor, where: str) -> None:
    """CheckpointError, naming the index, if a scale byte is 255: NaN in the format, and not a scale that any weight
    has.
    """
    if scales.numel() and int(scales.max()) == 255:
        place = (scales == 255).nonzero()[0].tolist()
        raise CheckpointError(f"{where}: scale byte 255 (NaN) at index {place}; at most 254 is expected")


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256 * 256] integers: entry (scale byte, code byte) is the two values, low nibble first, as they lie in
    memory.
    """
    code = torch.arange(256)
    values = torch.tensor(VALUES, dtype=torch.float64)
    pairs = torch.stack([values[code & 15], values[code >> 4]], dim=-1)                          # [256, 2]
    scale = power_of_two(torch.arange(256) - 127)
    table = (scale[:, None, None] * pairs).to(dtype).contiguous()                                # [256, 256, 2]
    return table.view(_PAIR[dtype]).view(-1).to(device)


def _encode_groups(values: torch.Tensor, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """values [M, 32] fp32 -> blocks [M, 16], scales [M]."""
    largest = values.abs().amax(dim=-1)
    if not bool(torch.isfinite(largest).all()):
        raise CheckpointError(f"{where}: NaN or infinity cannot be written as MXFP4")
    fraction, exponent = torch.frexp(largest)               # largest = fraction * 2^exponent, fraction in [0.5, 1)
    # 6 = 0.75 * 2^3, so ceil(log2(largest / 6)) is exponent - 3, or one more where the fraction exceeds 0.75.
    power = (exponent - 3 + (fraction > 0.75)).clamp_(min=-127)
    power = torch.where(largest > 0, power, torch.full_like(power, -127))
    size = (values * power_of_two_fp32(-power)[:, None]).abs()
    code = (size > 0.25).to(torch.uint8)
    for bound, tie_goes_up in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += size >= bound if tie_goes_up else size > bound
    code |= torch.signbit(values).to(torch.uint8) << 3
    return code[:, 0::2] | code[:, 1::2] << 4, (power + 127).to(torch.uint8)
