"""Decode by table: out[m, c] = table[row[m], code[m, c]], many values per look-up.

MXFP4 has 16 codes and few exponents, so every conversion here is a table: one index, built from an exponent and a
byte (or two bytes) of codes, fetches two (or four) finished values at once. No arithmetic on the values, so nothing
is rounded on the way and every device gives the same bytes. On the CPU the indices are made in pieces that stay in
the cache; larger pieces cost up to eight times as much, all of it page faults of the temporaries.
"""
from __future__ import annotations

import torch

_CPU_PIECE = 1 << 17        # look-ups per piece: 0.5 MB of int32 indices
_DEVICE_PIECE = 1 << 25      # 128 MB


def lookup(table: torch.Tensor, row: torch.Tensor, code: torch.Tensor, out: torch.Tensor) -> None:
    """Fill out[m, c] with table[row[m] * width + code[m, c]], width = table.numel() / number of rows = 2^(bits of
    code).

    table: [rows * 256] or [rows * 65536], int32 or int64. row: [M] uint8 or int16, not negative. code: [M, C] uint8, or
    int16 whose bits are an unsigned number. out: [M, C] of the table's dtype, contiguous. All on one device.
    """
    bits = 8 * code.element_size()
    count, columns = code.shape
    piece = _CPU_PIECE if code.device.type == "cpu" else _DEVICE_PIECE
    step = max(1, piece // columns)
    for start in range(0, count, step):
        index = (code if bits == 8 else code.view(torch.uint16))[start : start + step].to(torch.int32)
        index.bitwise_or_(row[start : start + step].to(torch.int32).bitwise_left_shift_(bits)[:, None])
        torch.index_select(table, 0, index.view(-1), out=out[start : start + step].view(-1))


def aligned(data: torch.Tensor) -> torch.Tensor:
    """`data`, contiguous and at an address that is a multiple of 8, so that its bytes can be viewed as wider
    integers.
    """
    data = data.contiguous()
    return data.clone() if data.data_ptr() % 8 or data.storage_offset() * data.element_size() % 8 else data
