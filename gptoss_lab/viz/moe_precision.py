"""What bf16 in the router changes: expert choice, weights, and the model's logits.

OpenAI's torch code rounds the router's logits and the experts' weights to bf16, and the post calls computing the expert
weights in bf16 crucial. Two questions hide in that: how far is each rounding from exact, and does it matter beside the
rest of a bf16 model? The first is asked with everything else in fp32, one rounding at a time (a forward hook replaces
what a router returns). The second loads the model in bf16 with `router_dtype` fp32 and bf16, and once more with the
experts replayed from the exact run, which separates the choice of experts from everything else.

What is lost: one prompt, one checkpoint. Nothing here says how answers change; the accuracy study does (accuracy.py).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import plotly.graph_objects as go
import torch

from gptoss_kernels.moe.study import routing_change
from gptoss_kernels.reference.moe import route
from gptoss_lab.model import Recorder, load_model
from gptoss_lab.model.moe import Router
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

FP32, BF16 = torch.float32, torch.bfloat16
ROUNDINGS = {
    "weights": (FP32, FP32, BF16),
    "softmax and weights": (FP32, BF16, BF16),
    "logits": (BF16, FP32, FP32),
    "logits, softmax, weights": (BF16, BF16, BF16),
}
"""Name -> dtypes of logits, softmax, weights. (A softmax in bf16 returns bf16, so it never stands alone.)"""
PLAIN = {"moe": "reference"}
"""The experts in plain torch: a kernel that quantises activations to e4m3 would drown what is studied."""
Choice = tuple[torch.Tensor, torch.Tensor]
Chooser = Callable[[int, torch.Tensor, int], Choice]
ROUTER = ("router_ids", "router_weights", "router_logits")


@dataclass(frozen=True)
class Pass:
    """One pass: logits [T, V] fp32, expert ids and weights [L, T, k], router logits [L, T, E], all on the CPU."""

    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    router_logits: torch.Tensor

    @cached_property
    def log_probabilities(self) -> torch.Tensor:
        """[T, V] fp32."""
        return torch.log_softmax(self.logits, dim=-1)


@dataclass(frozen=True)
class Effect:
    """One pass against another. sets_changed: share of (layer, token) with other experts. weight_error: largest error
    of a weight where the experts are the same. kl: mean over tokens of KL(other || this), nats. top_changed: share of
    tokens whose most likely next token differs. logit_error: largest difference over the largest logit."""

    name: str
    sets_changed: float
    weight_error: float
    kl: float
    top_changed: float
    logit_error: float


@torch.inference_mode()
def observe(model: torch.nn.Module, ids: torch.Tensor) -> Pass:
    """A pass over ids [T] with what its routers decided."""
    seen = Recorder(*ROUTER)
    logits = model(ids.to(model.device), logits="all", observe=seen)
    chosen, weights, raw = (seen.stacked(name) for name in ROUTER)
    return Pass(logits.float().cpu(), chosen, weights.float(), raw.float())


def rounded(logits: torch.Tensor, experts_per_token: int, dtypes: Sequence[torch.dtype]) -> Choice:
    """ids and weights with logits, softmax and weights in these three dtypes. logits: [T, E]."""
    logits_dtype, softmax_dtype, weight_dtype = dtypes
    low = logits.to(logits_dtype)
    ids, _ = route(low, experts_per_token)
    return ids, torch.softmax(low.gather(-1, ids).to(softmax_dtype), dim=-1).to(weight_dtype)


@contextmanager
def routed_by(model: torch.nn.Module, choose: Chooser) -> Iterator[None]:
    """Inside, every router answers choose(layer, its logits [T, E], k) -> ids, weights. Forward hooks do it."""
    hooks = []
    for layer, router in enumerate(m for m in model.modules() if isinstance(m, Router)):
        def replace(module: Router, given: tuple, out: tuple, layer: int = layer) -> tuple:
            ids, weights = choose(layer, out[2], module.experts_per_token)
            return ids, weights.to(out[1].dtype), out[2]
        hooks.append(router.register_forward_hook(replace))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def round_to(dtypes: Sequence[torch.dtype]) -> Chooser:
    """For `routed_by`: `rounded` with these dtypes of logits, softmax, weights."""
    return lambda layer, logits, experts_per_token: rounded(logits, experts_per_token, dtypes)


def replay(ids: torch.Tensor) -> Chooser:
    """For `routed_by`: the experts of another pass, ids [L, T, k], weighted by this pass's own logits."""
    def choose(layer: int, logits: torch.Tensor, experts_per_token: int) -> Choice:
        chosen = ids[layer].to(logits.device)
        return chosen, torch.softmax(logits.float().gather(-1, chosen), dim=-1)
    return choose


def compare(name: str, this: Pass, exact: Pass) -> Effect:
    """The effect of whatever differs between two passes over the same tokens; `exact` is the one measured against."""
    ours, order = this.ids.sort(dim=-1)
    theirs, exact_order = exact.ids.sort(dim=-1)
    same = (ours == theirs).all(dim=-1)                                 # [L, T]
    error = (this.weights.gather(-1, order) - exact.weights.gather(-1, exact_order)).abs()[same]
    p, q = exact.log_probabilities, torch.log_softmax(this.logits, dim=-1)
    divergence = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)       # [T]
    return Effect(
        name, 1 - same.double().mean().item(), error.max().item() if error.numel() else 0.0, divergence.mean().item(),
        (this.logits.argmax(-1) != exact.logits.argmax(-1)).double().mean().item(),
        ((this.logits - exact.logits).abs().max() / exact.logits.abs().max()).item(),
    )


@dataclass(frozen=True)
class Study:
    """What came out on one prompt. exact: the pass in fp32 throughout. to_exact: every other pass against it, by name.
    to_reference: bf16 models against the one whose router is bf16 too, which is what OpenAI's code does."""

    exact: Pass
    to_exact: dict[str, Effect]
    to_reference: dict[str, Effect]


IN_FP32, IN_BF16 = "bf16 model; router in fp32", "bf16 model; router in bf16, as OpenAI's code"
REPLAYED = "bf16 model; router in fp32, experts replayed from fp32"
ALL_ROUNDED = f"bf16 model; router in fp32, {tuple(ROUNDINGS)[-1]} rounded"


def study(path: str | Path, ids: torch.Tensor, device: torch.device) -> Study:
    """Roundings in an fp32 model, then bf16 models, over one prompt. path: a checkpoint folder. ids: [T] int64.

    Three models are loaded, one after the other.
    """
    model = load_model(path, device, FP32, backends=PLAIN)
    exact = observe(model, ids)
    to_exact, to_reference = [], []
    for name, dtypes in ROUNDINGS.items():
        with routed_by(model, round_to(dtypes)):
            to_exact.append(compare(f"fp32 model; {name} in bf16", observe(model, ids), exact))
    model = load_model(path, device, BF16, router_dtype=BF16, backends=PLAIN)
    reference = observe(model, ids)
    to_exact.append(compare(IN_BF16, reference, exact))
    model = load_model(path, device, BF16, backends=PLAIN)
    plain = observe(model, ids)
    to_exact.append(compare(IN_FP32, plain, exact))
    to_reference.append(compare(IN_FP32, plain, reference))
    for name in ("weights", "logits", "logits, softmax, weights"):
        with routed_by(model, round_to(ROUNDINGS[name])):
            to_reference.append(compare(f"bf16 model; router in fp32, {name} rounded", observe(model, ids), reference))
    with routed_by(model, replay(exact.ids)):
        to_exact.append(compare(REPLAYED, observe(model, ids), exact))
    return Study(exact, *({effect.name: effect for effect in effects} for effects in (to_exact, to_reference)))


def effects_table(effects: Iterable[Effect], against: str) -> Table:
    """The effects, marked live. against: what they are measured against."""
    return table(
        [[e.name, f"{100 * e.sets_changed:.2f}", f"{e.weight_error:.1e}", f"{e.kl:.1e}", f"{100 * e.top_changed:.1f}",
          f"{e.logit_error:.1e}", "live"] for e in effects],
        [f"against {against}", "expert sets changed, %", "largest weight error", "KL, nats", "top token changed, %",
         "largest logit error", "origin"])


def roundings_table(router_logits: torch.Tensor, experts_per_token: int) -> Table:
    """Each rounding alone on the same router logits [.., E], so no layer inherits another's error."""
    flat = router_logits.flatten(0, -2).double()
    lines = []
    for name, dtypes in {"nothing": (FP32,) * 3, **ROUNDINGS}.items():
        names = ("logits_dtype", "softmax_dtype", "weight_dtype")
        change = routing_change(flat, experts_per_token, **dict(zip(names, dtypes, strict=True)))
        lines.append([name, f"{100 * change.sets_changed:.2f}", f"{change.weight_error:.1e}", "live"])
    return table(lines, ["in bf16", "expert sets changed, %", "largest weight error", "origin"])


def offset_changes(offsets: Sequence[float], num_experts: int, tokens: int = 2048) -> list[float]:
    """Share of random tokens whose experts change when logits (normal, plus a common offset) are rounded to bf16.

    The offset itself changes no softmax and no choice; it only moves the logits to where bf16 is coarser.
    """
    g = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(tokens, num_experts, dtype=torch.float64, generator=g)
    return [routing_change(logits + offset, 4, logits_dtype=BF16).sets_changed for offset in offsets]


def offset_figure(
    experts: Sequence[int] = (16, 32, 128), offsets: Sequence[float] = tuple(range(0, 35, 2))
) -> go.Figure:
    """`offset_changes` for several numbers of experts."""
    fig = go.Figure()
    found = {count: [100 * share for share in offset_changes(offsets, count)] for count in experts}
    for (count, shares), colour in zip(found.items(), (style.GREY, style.GREEN, style.PURPLE), strict=False):
        fig.add_scatter(x=list(offsets), y=shares, mode="lines+markers", name=f"{count} experts",
                        line={"color": colour}, hovertemplate="offset %{x}: %{y:.2f} %<extra>%{fullData.name}</extra>")
    fig.update_xaxes(title_text="number added to every logit")
    fig.update_yaxes(title_text="tokens with other experts, %", rangemode="tozero")
    first, last = found[experts[-1]][0], found[experts[-1]][-1]
    return style.finish(
        fig, f"{experts[-1]} experts: bf16 logits change {first:.1f} % of the choices, "
             f"{last:.0f} % with an offset of {offsets[-1]:g}",
        "live", "2,048 tokens with normal logits, 4 experts each; the offset cancels in exact arithmetic")

