"""Random bytes and weights that depend on seed and place only, not on device, order or number of pieces.

Word number i of a stream is splitmix64 (a counter through a bijective mixer) of the stream's key plus i: integer
operations, so a GPU makes the same words as a CPU, any part of a tensor can be made alone, and both layouts of a
checkpoint get the same weights. Values come from the words by table: 16 random bits choose one of 65,536 quantiles of
the normal distribution, already rounded to bf16. Largest value 4.3 standard deviations; good enough for weights, no
generator for statistics.
"""
from __future__ import annotations

import functools
import hashlib
import statistics

import torch

from gptoss_lab.checkpoint.lookup import lookup

_STEP, _MIX1, _MIX2 = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_PIECE = 1 << 15            # words made at a time on the CPU: 256 KB, stays in the cache


def stream_key(seed: int, name: str) -> int:
    """The key of the stream called `name` under `seed`: 64 bits, as a signed integer."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little", signed=True)


def words(key: int, start: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Words start..start+count-1 of a stream, int64: splitmix64 with the state key + (i + 1) * 0x9E3779B97F4A7C15."""
    out = torch.empty(count, dtype=torch.int64, device=device)
    step = _PIECE if out.device.type == "cpu" else max(1, count)
    for first in range(0, count, step):
        state = torch.arange(start + first + 1, start + min(first + step, count) + 1, device=device)
        state.mul_(_STEP).add_(key)
        state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)       # >> on int64 keeps the sign
        state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
        out[first : first + step] = state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))
    return out


def random_bytes(key: int, start: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bytes start..start+count-1 of a stream, uint8."""
    first = start // 8
    data = words(key, first, -(-(start + count) // 8) - first, device).view(torch.uint8)
    return data[start - 8 * first : start - 8 * first + count]


def normal(
    key: int, start: int, count: int, mean: float, std: float, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Values start..start+count-1 of a stream, bf16, normally distributed."""
    bits = random_bytes(key, 2 * start, 2 * count, device)
    out = torch.empty(count, dtype=torch.bfloat16, device=device)
    table = _quantiles(mean, std, torch.device(device))
    row = torch.zeros(1, dtype=torch.uint8, device=device)
    step = 1 << 17 if out.device.type == "cpu" else max(1, count)
    for first in range(0, count, step):
        piece = slice(first, first + step)
        lookup(table, row, bits.view(torch.int16)[None, piece], out.view(torch.int16)[None, piece])
    return out


@functools.lru_cache(maxsize=64)
def _quantiles(mean: float, std: float, device: torch.device) -> torch.Tensor:
    """[65536] int16, the bits of bf16 values: the normal distribution at (i + 0.5) / 65536."""
    return (mean + std * normal_quantiles(65536)).to(torch.bfloat16).view(torch.int16).to(device)


@functools.cache
def normal_quantiles(count: int) -> torch.Tensor:
    """[count] float64: the standard normal distribution at (i + 0.5) / count."""
    inverse = statistics.NormalDist().inv_cdf
    return torch.tensor([inverse((i + 0.5) / count) for i in range(count)], dtype=torch.float64)
