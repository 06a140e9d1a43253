"""What a conversion did to the values: proven exact block by block, or rounded with a measured error."""
from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

MOST_LISTED = 1000          # wide blocks listed per tensor; all are counted


@dataclass(frozen=True)
class WideBlock:
    """A block whose exponents spread over more than 14.

    expert: index of the matrix. row, column: of the block. spread: largest minus smallest exponent of its groups that
    are not all zeros. rounded: codes whose value changed. max_abs_error: of the weights.
    """

    expert: int
    row: int
    column: int
    spread: int
    rounded: int
    max_abs_error: float


@dataclass
class BlockReport:
    """Of a table conversion: blocks, how many of them exact, the wide ones, and the number of blocks of each spread."""

    blocks: int = 0
    exact_blocks: int = 0
    wide: list[WideBlock] = field(default_factory=list)
    spreads: list[int] = field(default_factory=lambda: [0] * 256)
    wide_blocks: int = 0

    @property
    def exact(self) -> bool:
        """Whether no value of any block changed."""
        return self.exact_blocks == self.blocks

    def add(self, other: BlockReport) -> None:
        """Take in the report of a further part."""
        self.blocks += other.blocks
        self.exact_blocks += other.exact_blocks
        self.wide_blocks += other.wide_blocks
        self.wide = (self.wide + other.wide)[:MOST_LISTED]
        self.spreads = [a + b for a, b in zip(self.spreads, other.spreads, strict=True)]

    def summary(self) -> dict[str, Any]:
        """The report as JSON; `wide` lists at most MOST_LISTED of the `wide_blocks`."""
        return {
            "blocks": self.blocks, "exact_blocks": self.exact_blocks, "wide_blocks": self.wide_blocks,
            "max_abs_error": max((block.max_abs_error for block in self.wide), default=0.0),
            "spreads": {str(spread): count for spread, count in enumerate(self.spreads) if count},
            "wide": [asdict(block) for block in self.wide],
        }

    def complaint(self) -> str:
        """Which blocks were rounded, in words; the first eight of them."""
        rounded = [block for block in self.wide if block.rounded]
        listed = "; ".join(
            f"expert {b.expert} block ({b.row}, {b.column}) spread {b.spread}, {b.rounded} codes" for b in rounded[:8]
        )
        count = self.blocks - self.exact_blocks
        return f"{count} of {self.blocks} blocks were rounded: {listed}{' ...' if count > 8 else ''}"


@dataclass
class RoundingReport:
    """Of a rounding conversion, over all its values: largest error, and sums for the root mean square relative to the
    weights.
    """

    max_abs_error: float = 0.0
    squared_error: float = 0.0
    squared_weight: float = 0.0

    @property
    def relative_rms_error(self) -> float:
        """sqrt(sum error^2 / sum weight^2), 0 for zero weights."""
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else 0.0

    @property
    def exact(self) -> bool:
        """Whether no value changed."""
        return self.max_abs_error == 0.0

    def measure(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Take in values before and after rounding, of any float dtype and equal shape. Works in float64."""
        if not before.numel():
            return
        before, error = before.double(), after.double() - before.double()
        self.max_abs_error = max(self.max_abs_error, float(error.abs().max()))
        self.squared_error += float((error * error).sum())
        self.squared_weight += float((before * before).sum())

    def add(self, other: RoundingReport) -> None:
        """Take in the report of a further part."""
        self.max_abs_error = max(self.max_abs_error, other.max_abs_error)
        self.squared_error += other.squared_error
        self.squared_weight += other.squared_weight

    def summary(self) -> dict[str, Any]:
        """The report as JSON."""
        return {"max_abs_error": self.max_abs_error, "relative_rms_error": self.relative_rms_error}

    def complaint(self) -> str:
        """The error in words."""
        return f"values were rounded, by at most {self.max_abs_error:.3g} ({self.relative_rms_error:.2%} rms)"


Report = BlockReport | RoundingReport
