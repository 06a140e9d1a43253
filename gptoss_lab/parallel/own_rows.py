"""The residual stream of a long prompt cut by rows: each rank sums its own rows, and everyone gets all of them in e4m3.

Instead of residual + the sum of all parts on every rank (residual.py), a rank keeps the residual of its own rows alone,
adds the ranks' parts to those, and hands out their norm, quantised as the next products take it: three quarters of the
bytes between two ranks, and norm, quantisation and routing once for each row.

Between GPUs of one node the kernels of gptoss_kernels.comm.own_rows over the memory of a `ResidualSum`; elsewhere the
group's reduce-scatter and all-gather, which say the same in plain words.

What is lost: the residual stream lies on no rank as a whole, so whoever wants rows of others must gather them.
"""
from __future__ import annotations

import torch

from gptoss_kernels.comm import FusedAllReduce, FusedOwnRows, own_ranges
from gptoss_kernels.comm.own_rows import TILE
from gptoss_kernels.quant import Quantised, empty_quantised
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.quant import quantise_groups
from gptoss_kernels.upload import upload
from gptoss_lab.parallel.groups import Group


class OwnRows:
    """Sums of own rows over the ranks of `group`, and what is handed out of them.

    fused: the kernel of the group's `ResidualSum`, whose buffers hold the parts; None for the plain way. top: experts
    of a token. Made by all ranks of the group together.
    """

    def __init__(self, group: Group, fused: FusedAllReduce | None, top: int) -> None:
        self.group = group
        self._fused = None if fused is None else FusedOwnRows(fused, group.process_group, top)

    def counts(self, tokens: int) -> list[int]:
        """Rows of each rank."""
        return [len(own) for own in own_ranges(tokens, self.group.size)]

    def own(self, tokens: int) -> range:
        """Rows of this rank."""
        return own_ranges(tokens, self.group.size)[self.group.index]

    def sum(
        self, part: torch.Tensor, residual: torch.Tensor, what: str, norm_weight: torch.Tensor | None = None,
        eps: float = 1e-5, *, handed_out: bool = False,
    ) -> tuple[torch.Tensor, Quantised | None]:
        """Own rows [own, H] of residual + the sum over the ranks of part [T, H]; everyone's RMSNorm of it in e4m3.

        residual: [own, H]. what: the exchange's name. norm_weight: [H]; None for the last sum, whose second result is
        None. handed_out: `hand_out` follows before the second result is read, so the sum need not wait for it. The
        second result, whole tiles of rows of which T are filled, holds until the next call.
        """
        if self._fused is None:
            return self._plain(part, residual, what, norm_weight, eps)
        own, others = len(residual), len(part) - len(residual)
        received = (self.group.size - 1) * own * part.shape[1] * part.element_size()
        if norm_weight is not None:
            received += others * _row_bytes(part.shape[1])
        self.group.traffic.add(what, received)
        return self._fused(part, residual, norm_weight, eps, meet=not handed_out)

    def hand_out(
        self, ids: torch.Tensor, weights: torch.Tensor, tokens: int, what: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts ids [own, k] and weights [own, k] of own rows -> those of all `tokens` rows, until the next call."""
        if self._fused is None:
            counts = self.counts(tokens)
            return self.group.all_gather(ids, counts, what), self.group.all_gather(weights, counts, what)
        others = tokens - len(ids)
        self.group.traffic.add(what, others * ids.shape[1] * (ids.element_size() + weights.element_size()))
        return self._fused.hand_out(ids, weights, tokens)

    def gather(self, own: torch.Tensor, rows: list[int] | None, tokens: int, what: str) -> torch.Tensor:
        """Rows of everyone, [n, H], from own rows [own, H]: those numbered in `rows`, ascending, or all (None)."""
        if rows is None:
            return self.group.all_gather(own, self.counts(tokens), what)
        mine = self.own(tokens)
        here = torch.tensor([row - mine.start for row in rows if row in mine], dtype=torch.int64)
        counts = [sum(row in part for row in rows) for part in own_ranges(tokens, self.group.size)]
        return self.group.all_gather(own.index_select(0, upload(here, own.device)), counts, what)

    def _plain(
        self, part: torch.Tensor, residual: torch.Tensor, what: str, norm_weight: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, Quantised | None]:
        counts = self.counts(len(part))
        total = residual + self.group.reduce_scatter(part, counts, what)
        if norm_weight is None:
            return total, None
        codes, scale = quantise_groups(rms_norm(total, norm_weight, eps))
        made = empty_quantised(-(-len(part) // TILE) * TILE, part.shape[1], part.device)
        codes = self.group.all_gather(codes.view(torch.uint8), counts, what)             # not every library moves e4m3
        made.values.view(torch.uint8)[: len(part)] = codes
        made.scale[: len(part)] = self.group.all_gather(scale, counts, what)
        return total, made


def _row_bytes(hidden: int) -> int:
    """A row in e4m3: a byte a value, and a scale for each 128."""
    return hidden + 4 * -(-hidden // 128)
