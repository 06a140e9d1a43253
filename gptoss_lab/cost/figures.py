"""Kernel and engine figures that were noted without their raw readings (`data/published/figures.csv`).

They are yardsticks: other people's kernels on the same GPU. The cost model may use one where no result row of this
project exists yet, under the mark of its source; it never becomes a measured row.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gptoss_lab.config import ConfigError, ModelConfig, preset
from gptoss_lab.cost.columns import columns
from gptoss_lab.cost.errors import CostError
from gptoss_lab.cost.exchanges import whole_sum_bytes
from gptoss_lab.cost.fit import Equation
from gptoss_lab.cost.hardware import H200
from gptoss_lab.cost.precision import FP8_EXPERTS
from gptoss_lab.cost.tables import published_file, read_table
from gptoss_lab.cost.workload import Workload, decode, prefill

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_COLUMNS = ("quantity", "kernel", "model", "tokens", "batch", "gpus", "value", "unit", "source")


@dataclass(frozen=True)
class Figure:
    """One noted number. model, tokens and batch are None where the quantity has none. value in `unit`."""

    quantity: str
    kernel: str
    model: str | None
    tokens: int | None
    batch: int | None
    gpus: int
    value: float
    unit: str
    source: str

    @property
    def label(self) -> str:
        """For example "decode_attention_full, 8192 tokens, batch 16"."""
        tokens = "" if self.tokens is None else f", {self.tokens} tokens"
        return f"{self.quantity}{tokens}" + (f", batch {self.batch}" if self.batch not in (None, 1) else "")

    @property
    def seconds(self) -> float:
        """The value as seconds; CostError if it is a rate."""
        if self.unit not in SECONDS:
            raise CostError(f"{self.label} is a rate in {self.unit}, not a time")
        return self.value * SECONDS[self.unit]


def figures_path() -> Path:
    """`data/published/figures.csv` of this checkout."""
    return published_file("figures.csv")


def read_figures(path: str | Path | None = None, **where: object) -> list[Figure]:
    """The figures in file order; `where` keeps those with such fields. CostError names file and line of a bad one."""
    file = figures_path() if path is None else Path(path)
    read = read_table(file, _COLUMNS, _figure, "the figures")
    return [figure for figure in read if all(getattr(figure, key) == value for key, value in where.items())]


def kernel_equation(figure: Figure) -> Equation | None:
    """A kernel's figure as a line of the fit, None for a quantity that is no kernel of a pass (a whole model, a copy).

    Amounts are those of one layer: a figure says what one launch took.
    """
    phase, _, kind = figure.quantity.partition("_")
    if figure.quantity == "all_reduce":
        moved = whole_sum_bytes(2880, figure.gpus, figure.tokens)
        bytes_in, count = ("link_gathers", "gathers") if "NCCL" in figure.kernel else ("link", "collectives")
        amounts = {bytes_in: moved / H200.link_bytes_per_second, count: 1.0}
    elif figure.quantity == "product_fp8":
        return Equation(figure.label, H200.fp8_flop_per_second / (figure.value * 1e12), {"projections_fp8": 1.0},
                        origin="published")
    elif phase in ("prefill", "decode") and kind:
        amounts = _layer_amounts(preset(figure.model), phase, kind, figure)
    else:
        return None
    seconds = figure.seconds if figure.unit in SECONDS else amounts["expert_weights_fp8"] * _datasheet_share(figure)
    return Equation(figure.label, seconds, amounts, origin="published")


def _layer_amounts(config: ModelConfig, phase: str, kind: str, figure: Figure) -> dict[str, float]:
    work: Workload = (prefill if phase == "prefill" else decode)(figure.tokens, figure.batch)
    amounts = columns(config, work, FP8_EXPERTS)
    if kind.startswith("attention"):
        layers = sum(config.is_sliding(n) == (kind == "attention_window") for n in range(config.num_layers))
        return {kind: amounts[kind] / layers, "attention_launches": 1.0}
    # Half of a layer's six launches: no figure speaks of the small ones around the two products.
    share = {"experts_gate_up": 2 / 3, "experts_down": 1 / 3}[kind] / config.num_layers     # of FLOPs and of bytes
    return {"experts_fp8": amounts["experts_fp8"] * share,
            "expert_weights_fp8": amounts["expert_weights_fp8"] * share, "expert_launches": 3.0}


def _datasheet_share(figure: Figure) -> float:
    """Datasheet bandwidth over a figure in GB/s: how many times longer than the bound it took."""
    return H200.memory_bytes_per_second / (figure.value * 1e9)


def _figure(file: Path, number: int, raw: dict[str, str]) -> Figure:
    try:
        model = preset(raw["model"]).name if raw["model"] else None
        tokens, batch = (int(raw[key]) if raw[key] else None for key in ("tokens", "batch"))
        return Figure(raw["quantity"], raw["kernel"], model, tokens, batch, int(raw["gpus"]), float(raw["value"]),
                      raw["unit"], raw["source"])
    except (TypeError, ValueError, ConfigError) as error:
        raise CostError(f"{file.name}, line {number}: {error}") from None
