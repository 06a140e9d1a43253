"""What one GPU can do at most: by its datasheet, and by what was measured on it.

A bound divides bytes by a rate and FLOPs by a rate, so everything rests on five numbers per GPU. `H200` holds the
datasheet's: nothing can beat them, which is what makes a bound a bound. `H200_MEASURED` holds what a plain copy and a
large matrix product really reached: a fairer yardstick for a kernel, and no bound. Each number carries its mark
(published: a datasheet, or a figure whose readings were not kept; recorded: a result row of this project) and its
source; `Hardware.table` lists them.

What is lost: clocks. Under sustained load the GPU runs at 1.40 GHz where it starts at 1.98, and compute rates fall with
it; the rates here are those of a rested GPU.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from gptoss_lab.cost.errors import CostError, check_positive


@dataclass(frozen=True)
class Source:
    """Where a number comes from. mark: 'published' or 'recorded'. text: the document, or the conditions of the run."""

    mark: str
    text: str


@dataclass(frozen=True)
class Hardware:
    """One GPU and its link to the others of its node.

    memory_bytes: capacity. memory_bytes_per_second: reads plus writes. bf16_flop_per_second, fp8_flop_per_second: dense
    tensor-core rates, a multiply-add counted as two. link_bytes_per_second: NVLink, one direction.
    sources: one `Source` per number, by field name.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_second: float
    bf16_flop_per_second: float
    fp8_flop_per_second: float
    link_bytes_per_second: float
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in self.numbers():
            check_positive(f"{self.name} {name}", getattr(self, name))

    @classmethod
    def numbers(cls) -> tuple[str, ...]:
        """Names of the five numeric fields."""
        return tuple(f.name for f in fields(cls) if f.name not in ("name", "sources"))

    def flop_per_second(self, unit: str) -> float:
        """Dense rate of the tensor cores for operands of `unit`, 'bf16' or 'fp8'."""
        rates = {"bf16": self.bf16_flop_per_second, "fp8": self.fp8_flop_per_second}
        if unit not in rates:
            raise CostError(f"unit is {unit!r}; one of {', '.join(rates)} is expected")
        return rates[unit]

    def table(self) -> list[dict[str, Any]]:
        """One row per number: hardware, name (with its unit), value, mark, source."""
        return [
            {"hardware": self.name, "name": name, "value": getattr(self, name),
             "mark": self.sources[name].mark if name in self.sources else None,
             "source": self.sources[name].text if name in self.sources else None}
            for name in self.numbers()
        ]


_DATASHEET = Source("published", "NVIDIA H200 SXM datasheet, dense rates")
_ROWS = "data/measured/profile/h200.jsonl"

H200 = Hardware(
    name="H200 datasheet",
    memory_bytes=141e9,
    memory_bytes_per_second=4.8e12,
    bf16_flop_per_second=989e12,
    fp8_flop_per_second=1979e12,
    link_bytes_per_second=450e9,
    sources={name: _DATASHEET for name in Hardware.numbers()},
)

H200_MEASURED = Hardware(
    name="H200 measured",
    memory_bytes=141e9,
    memory_bytes_per_second=4277e9,
    bf16_flop_per_second=767e12,
    fp8_flop_per_second=1383e12,
    link_bytes_per_second=373e9,
    sources={
        "memory_bytes": _DATASHEET,
        "memory_bytes_per_second": Source("recorded", f"device copy, bytes read and written; {_ROWS}"),
        "bf16_flop_per_second": Source("recorded", f"bf16 matrix product of size 8192; {_ROWS}"),
        "fp8_flop_per_second": Source("recorded", f"fp8 product of size 8192, scales by row; {_ROWS}"),
        "link_bytes_per_second": Source("published", "peer copy over NVLink, raw readings not kept; "
                                        "data/published/figures.csv"),
    },
)
