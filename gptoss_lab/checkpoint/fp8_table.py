"""The table behind MXFP4 -> FP8: 16 codes, each shifted by 0..19 exponents, as e4m3 bytes. Made of integers only.

With the block scale 2^(e_max - 6), a code of a group that lies d exponents below e_max has the e4m3 value LUT[code] *
2^(6 - d). e4m3 counts in units of 2^-9, so that value is the whole number q = LUT[code] * 2^(15 - d), twice a code's
value being a whole number. For d <= 14 every q is whole and has at most two significant bits: 15 exponents fit
without loss. Beyond that q is rounded to nearest, ties to even, and some codes still land exactly (4 = 2^2 does until
d = 17); at d = 19 all that is left is zeros.
"""
from __future__ import annotations

import functools

import torch

TOP_EXPONENT = 6            # the block scale is 2^(e_max - 6): the largest value used is 6 * 2^6 = 384, of 448
EXACT_SPREAD = 14           # the last d at which every code is exact
LAST = 19                   # the first d at which every code has become zero
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)      # the magnitudes of the codes, doubled


def _round_half_even(numerator: int, shift: int) -> int:
    """numerator / 2^shift to the nearest whole number."""
    whole, rest = numerator >> shift, numerator & ((1 << shift) - 1)
    half = (1 << shift) >> 1
    return whole + (rest > half or (rest == half and shift > 0 and whole & 1))


def _units(code: int, d: int) -> int:
    """The magnitude of `code`, d exponents below the top, in units of 2^-9."""
    twice = _TWICE[code & 7]
    return twice << (EXACT_SPREAD - d) if d <= EXACT_SPREAD else _round_half_even(twice, d - EXACT_SPREAD)


def e4m3_byte(units: int, negative: bool) -> int:
    """The e4m3 byte of units * 2^-9 (units a whole number of at most four significant bits, at most 448 * 2^9)."""
    if units >= 8:
        power = units.bit_length() - 1
        units = (power - 2) << 3 | (units >> (power - 3)) & 7
    return units | 0x80 * negative


def code_bytes() -> list[list[int]]:
    """[20][16]: the e4m3 byte of each code at each d."""
    return [[e4m3_byte(_units(code, d), code >= 8) for code in range(16)] for d in range(LAST + 1)]


@functools.cache
def landed(device: torch.device) -> torch.Tensor:
    """[20, 16] bool: whether the e4m3 byte of a code at d has exactly the code's value."""
    rows = [[_units(code, d) << d == _TWICE[code & 7] << EXACT_SPREAD for code in range(16)] for d in range(LAST + 1)]
    return torch.tensor(rows, device=device)


@functools.cache
def four_codes(device: torch.device) -> torch.Tensor:
    """[20 * 65536] int32: entry (d, two bytes of codes) is four e4m3 bytes in memory order, low nibbles first."""
    single = torch.tensor(code_bytes(), dtype=torch.int64)                                 # [20, 16]
    byte = torch.arange(256)
    pair = single[:, byte & 15] | single[:, byte >> 4] << 8                                # [20, 256], little-endian
    word = torch.arange(65536)
    table = pair[:, word & 255] | pair[:, word >> 8] << 16                                 # [20, 65536]
    return table.to(torch.int32).view(-1).to(device)
