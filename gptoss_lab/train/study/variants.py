"""The table of variants, and how one becomes a model. A new variant is one more entry of `VARIANTS`.

A variant is the baseline with one thing changed: the form of its weights, a constant of the config, a backend, the
router's dtype, its caches. Everything else is the reference arithmetic on every machine, so that no kernel's own
rounding is mixed in: what a variant costs is a property of the format, and kernels are tested against it elsewhere.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint import CheckpointError, convert, open_checkpoint
from gptoss_lab.checkpoint.compact import expand
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.load import build_model
from gptoss_lab.model.operations import Operations
from gptoss_lab.train.study import backends, names
from gptoss_lab.train.study.caches import Fp8CacheModel
from gptoss_lab.train.study.source import Rows, StudySource

PLAIN = {f.name: "reference" for f in fields(Operations)}
FORMS: dict[str, dict[str, Any]] = {
    "mxfp4": {}, "fp8": {"exact": True}, "fp8 amax": {"scales": "amax"}, "fp8 attention": {"attention_fp8": True},
}
"""Form of the weights -> options of `checkpoint.convert`; "mxfp4" is the checkpoint itself."""
BATCH = 128
"""Problems that are answered, or read, together; fewer are read together if their logits are many."""


@dataclass(frozen=True)
class Variant:
    """One thing changed.

    name: by which rows and figures know it. what: one line. form: a key of FORMS. config: changes the model's
    constants. backends: operation -> backend, where not the reference. router: dtype of logits and weights, default
    fp32. sinks: whether they count. fp8_cache: keys and values in e4m3. batch: sequences answered together.
    """

    name: str
    what: str
    form: str = "mxfp4"
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    backends: Mapping[str, str] = field(default_factory=dict)
    router: torch.dtype | None = None
    sinks: bool = True
    fp8_cache: bool = False
    batch: int = BATCH


def _window(keys: int) -> Callable[[ModelConfig], ModelConfig]:
    return lambda config: replace(config, sliding_window=config.sliding_window + keys)


def _truncated(config: ModelConfig) -> ModelConfig:
    return replace(config, rope=replace(config.rope, truncate=True))


BASELINE = Variant(names.BASELINE, "MXFP4 weights, bf16 activations, router in fp32: the model as it was trained")
CONTROL = Variant(names.CONTROL, "the baseline, 12 problems at a time: what rounding in other shapes does", batch=12)
VARIANTS: tuple[Variant, ...] = (
    CONTROL,
    Variant("FP8 exact", "e4m3 weights, 128x128 blocks, power-of-two scales", form="fp8"),
    Variant("FP8 amax scales", "e4m3 weights, 128x128 blocks, scales amax / 448", form="fp8 amax"),
    Variant("FP8 activations", "e4m3 in 1x128 groups before each expert product",
            backends={"moe": backends.ACTIVATIONS}),
    Variant("FP8 attention weights", "QKV and output projection in e4m3 too", form="fp8 attention"),
    Variant("router in bf16", "router weights, logits and expert weights in bf16, as in OpenAI's code",
            router=torch.bfloat16),
    Variant("router logits in bf16", "router logits rounded to bf16", backends={"route": backends.LOGITS}),
    Variant("expert weights in bf16", "the chosen experts' weights rounded to bf16",
            backends={"route": backends.WEIGHTS}),
    Variant("softmax before top-k", "over all experts, then the top k without renormalising",
            backends={"route": backends.BEFORE}),
    Variant("sinks ignored", "no sink in any softmax", sinks=False),
    Variant("window - 1", "sliding layers see one key less", config=_window(-1)),
    Variant("window + 1", "sliding layers see one key more", config=_window(1)),
    Variant("YaRN rounded", "ramp bounds rounded to whole pairs (truncate)", config=_truncated),
    Variant("KV in FP8", "keys and values in e4m3, one scale per head", fp8_cache=True),
)


def choose(wanted: Sequence[str] | None) -> tuple[Variant, ...]:
    """The variants of these names, in the table's order; all for None. ValueError for a name that is none."""
    known = [v.name for v in VARIANTS]
    unknown = sorted(set(wanted or ()) - set(known))
    if unknown:
        raise ValueError(f"no variant is called {unknown[0]!r}; there are {', '.join(known)}")
    return VARIANTS if wanted is None else tuple(v for v in VARIANTS if v.name in wanted)


class Forms:
    """A checkpoint in every form of FORMS, converted at first use. source: a folder in MXFP4, or a compact file.

    folder: for what is made. CheckpointError: a source that cannot be read, or holds no MXFP4.
    """

    def __init__(self, source: Path, folder: Path) -> None:
        compact = source.is_file() and not (source.parent / "config.json").exists()
        self.folder, self._made = folder, {"mxfp4": expand(source, folder / "mxfp4") if compact else source}
        layout = open_checkpoint(self._made["mxfp4"]).layout
        if layout not in ("hf", "original"):
            raise CheckpointError(f"{source} is in the {layout} layout; the study starts from MXFP4 weights")

    def path(self, form: str) -> Path:
        """The folder of a form."""
        if form not in self._made:
            target = self.folder / form.replace(" ", "-")
            convert(self._made["mxfp4"], target, "fp8", **FORMS[form])
            self._made[form] = target
        return self._made[form]


def build(
    variant: Variant, forms: Forms, rows: Rows, prompts: Sequence[Sequence[int]], device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """The variant's model on `rows`, as the engine takes one. prompts: row numbers, to measure a cache's scales on."""
    checkpoint = open_checkpoint(forms.path(variant.form))
    source = StudySource(checkpoint, rows, variant.config(checkpoint.config), variant.sinks)
    with backends.studying():
        model = build_model(source, device, dtype, router_dtype=variant.router, backends=PLAIN | dict(variant.backends))
    return Fp8CacheModel(model, prompts) if variant.fp8_cache else model
