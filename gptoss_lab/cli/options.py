"""Options that several commands share, and what they mean."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gptoss_lab.config import ConfigError, ModelConfig, preset

if TYPE_CHECKING:
    from gptoss_lab.engine import SamplingParams

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Checkpoint = Annotated[
    Path | None,
    typer.Option(envvar="GPTOSS_LAB_CHECKPOINT", help="Checkpoint folder. Default: the small nano checkpoint."),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto: a GPU where torch can use one.")]
Precision = Annotated[
    Literal["auto", "bfloat16", "float32"], typer.Option("--dtype", help="Of activations and cache; auto is bfloat16.")
]
Forward = Annotated[
    Literal["auto", "plain", "fast"],
    typer.Option("--forward", help="The plain model, or the fast one in fused kernels; auto: fast on a Hopper GPU."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy, 1 the model's own distribution.")]
TopK = Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens that together reach p; 1 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same tokens. Default: a fresh one.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print tokens per second on stderr.")]


def known_preset(name: str) -> ModelConfig:
    """A preset by its name, or by its size alone: "gpt-oss-20b" or "20b"."""
    try:
        return preset(name)
    except ConfigError as error:
        try:
            return preset(f"gpt-oss-{name}")
        except ConfigError:
            raise typer.BadParameter(str(error)) from None


def sampling_params(**values: Any) -> SamplingParams:
    """SamplingParams from options; a value out of range is a wrong command line."""
    from gptoss_lab.engine import SamplingError, SamplingParams

    try:
        return SamplingParams(**values)
    except SamplingError as error:
        raise typer.BadParameter(str(error)) from None
