"""`gptoss-lab cost`: seconds and dollars of a pass, a plan, the published rows, a fleet; for people, JSON or CSV."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from gptoss_lab.cost import Precision
    from gptoss_lab.cost.performance import PerformanceModel

cost = typer.Typer(help="What a pass costs: the bound, measured, published and modelled values side by side.")
Model = Annotated[str, typer.Option("--model", help="gpt-oss-20b or gpt-oss-120b (or 20b, 120b).")]
Phase = Annotated[Literal["prefill", "decode"], typer.Option(help="Which phase.")]
Tokens = Annotated[int, typer.Option(help="Prompt tokens (prefill) or context tokens (decode) of each sequence.")]
Batch = Annotated[int, typer.Option(help="Sequences of the whole replica.")]
Ways = Annotated[int, typer.Option(help="Ways of expert (ep), data (dp), tensor (tp) parallelism.")]
Price = Annotated[float, typer.Option(help="Dollars per GPU-hour.")]
Busy = Annotated[float, typer.Option("--utilisation", help="Busy share of the paid time, above 0 up to 1.")]
Weights = Annotated[Literal["fp8", "mxfp4", "bf16"], typer.Option(help="Format of the expert weights.")]
Projections = Annotated[Literal["bf16", "fp8"], typer.Option(help="Format of the QKV and output projections.")]
Kv = Annotated[Literal["bf16", "fp8"], typer.Option(help="Format of the KV cache.")]
By = Annotated[Literal["engine", "kernels", "published", "bound"],
               typer.Option(help="Whose times: this engine (measured rows), kernels alone, the post, or the bound.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
Rows = Annotated[Path | None, typer.Option("--rows", help="Result rows to use. Default: data/measured.")]


@cost.callback()
def _cost() -> None:
    """What a pass costs: the bound, measured, published and modelled values side by side."""


@cost.command("estimate")
def estimate(
    model: Model = "gpt-oss-120b", phase: Phase = "decode", tokens: Tokens = 8192, batch: Batch = 1, ep: Ways = 1,
    dp: Ways = 1, tp: Ways = 1, weights: Weights = "fp8", projections: Projections = "fp8", kv: Kv = "bf16",
    price: Price = 3.0, utilisation: Busy = 1.0, rows: Rows = None, json: options.Json = False, csv: Csv = False,
) -> None:
    """One pass under one plan: its bound, what was measured and published, and what each model says."""
    from gptoss_lab.cost import Plan
    from gptoss_lab.cost.estimate import Question, answers
    from gptoss_lab.cost.performance import calibrate, kernels_alone, published_system

    measured = _rows(rows)
    question = Question(options.known_preset(model), phase, tokens, batch, Plan(ep, dp, tp),
                        _precision(weights, projections, kv), price, utilisation)
    given = answers(question, measured, [calibrate(measured), kernels_alone(measured), published_system()])
    lines = [{"answer": a.name, "mark": a.mark, "seconds": a.seconds, **_point(a.point(question)), "source": a.source}
             for a in given]
    fit = question.memory
    if json:
        print_json({"question": {**asdict(question), "config": question.config.name}, "answers": lines,
                    "memory": {**asdict(fit), "fits": fit.fits}})
        return
    _print(f"{phase} of {question.config.name}, {question.plan}, {tokens} tokens, batch {batch}", lines, csv)
    note(f"memory of the fullest GPU: {fit.reason}")


@cost.command("plans")
def plans(
    model: Model = "gpt-oss-120b", phase: Phase = "decode", tokens: Tokens = 8192, by: By = "engine",
    every: Annotated[bool, typer.Option("--every", help="All of (EP, DP, TP), not EPn DP1 TPn alone.")] = False,
    weights: Weights = "fp8", projections: Projections = "fp8", kv: Kv = "bf16", price: Price = 3.0,
    utilisation: Busy = 1.0, rows: Rows = None, json: options.Json = False, csv: Csv = False,
) -> None:
    """Every plan at batch 1 to 128: speed per user, dollars per million tokens, the Pareto front, what does not fit."""
    from gptoss_lab.cost import sweep

    found = sweep.sweep(_model(by, _rows(rows)), options.known_preset(model), phase, tokens,
                        sweep.NODE_PLANS if every else sweep.EP_PLANS, usd_per_gpu_hour=price, utilisation=utilisation,
                        precision=_precision(weights, projections, kv))
    front = {id(c) for c in sweep.pareto_front(found)}
    lines = [{"plan": str(c.plan), "batch": c.batch, "seconds": c.point.step_seconds, **_point(c.point),
              "fits": c.memory.fits, "front": id(c) in front} for c in found]
    if json:
        print_json(lines)
        return
    _print(f"{phase} of {model}, {tokens} tokens, modelled by: {by}", lines, csv)


@cost.command("published")
def published(rows: Rows = None, json: options.Json = False, csv: Csv = False) -> None:
    """The 32 published prefill rows: latency and cost, recomputed, beside the bound and ours."""
    from gptoss_lab.cost.comparison import compare

    lines = [compared.table() for compared in compare(_rows(rows))]
    if json:
        print_json(lines)
        return
    shown = ("ep", "dp", "tp", "input_tokens", "published_s", "bound_s", "ours_s", "ours_is", "published_over_bound",
             "published_usd_per_million", "recomputed_usd_per_million", "ours_usd_per_million")
    _print("Published prefill (batch 1, FP8)", lines if csv else [
        {"model": line["model"].removeprefix("gpt-oss-"), **{key: line[key] for key in shown}} for line in lines], csv)


@cost.command("fleet")
def fleet(
    model: Model = "gpt-oss-120b", rate: Annotated[float, typer.Option(help="Requests per second.")] = 20.0,
    input_tokens: Annotated[int, typer.Option(help="Mean prompt tokens.")] = 4096,
    output_tokens: Annotated[int, typer.Option(help="Mean answer tokens.")] = 512,
    first_token: Annotated[float, typer.Option(help="Goal: p95 of the first token, seconds.")] = 1.0,
    per_token: Annotated[float, typer.Option(help="Goal: p95 of the time per token, seconds.")] = 0.02,
    by: Annotated[Literal["engine", "kernels"], typer.Option(help="Whose times.")] = "engine",
    price: Price = 3.0, rows: Rows = None, json: options.Json = False, csv: Csv = False,
) -> None:
    """A fleet for a traffic: replicas of both pools, simulated quantiles, dollars a day, what breaks first."""
    from gptoss_lab.cost import SERVED
    from gptoss_lab.cost.pools import Goals, Traffic
    try:
        from gptoss_lab.cost.scale import Scenario, front_end_seconds, limits, size_fleet
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the simulation needs {error.name}: pip install 'gptoss-lab[lab]'") from None

    measured, config = _rows(rows), options.known_preset(model)
    scenario = Scenario(Traffic(rate, input_tokens, output_tokens), Goals(first_token, per_token))
    sized = size_fleet(_model(by, measured), config, scenario, precision=SERVED, usd_per_gpu_hour=price)
    carries = limits(config, sized.pools, SERVED, front_end_seconds_per_token=front_end_seconds(measured))
    pools = [{"pool": p.phase, "plan": str(p.plan), "batch": p.batch, "replicas": p.replicas, "gpus": p.gpus,
              "utilisation": p.utilisation, "usd_per_hour": p.usd_per_hour}
             for p in (sized.pools.prefill, sized.pools.decode)]
    if json:
        print_json({"pools": pools, "simulated": sized.report.table(), "meets_goals": sized.meets, "carries": carries})
        return
    if csv:
        flat = {f"{pool['pool']}_{key}": value for pool in pools for key, value in pool.items() if key != "pool"}
        carried = {f"full_at_{name.replace(', ', ' ').replace(' ', '_')}": times for name, times in carries.items()}
        _print("", [{**flat, "goals_met": sized.meets, **sized.report.table(), **carried}], csv)
        return
    _print(f"{rate:g} requests/s of {input_tokens} + {output_tokens} tokens, modelled by: {by}", pools, False)
    _print("Simulated", [{"goals met": sized.meets, **sized.report.table()}], False)
    _print("Full at so many times this traffic", [{"resource": k, "times": v} for k, v in carries.items()], False)


def _print(title: str, lines: Sequence[dict[str, Any]], csv: bool) -> None:
    if csv:
        from csv import DictWriter

        writer = DictWriter(sys.stdout, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    else:
        print_table(title, [key.replace("_", " ") for key in lines[0]], [list(line.values()) for line in lines])


def _point(point: Any) -> dict[str, float | None]:
    names = ("tokens_per_second_per_user", "tokens_per_second", "usd_per_million_tokens")
    return {name: None if point is None else getattr(point, name) for name in names}


def _precision(weights: str, projections: str, kv: str) -> Precision:
    from gptoss_lab.cost import Precision

    return Precision(experts=weights, dense=projections, kv=kv)


def _rows(folder: Path | None) -> list[dict[str, Any]]:
    from gptoss_lab import results

    return results.read_rows(results.recorded_folder() if folder is None else folder)


def _model(by: str, rows: list[dict[str, Any]]) -> PerformanceModel | None:
    from gptoss_lab.cost import performance

    makers = {"engine": lambda: performance.calibrate(rows), "kernels": lambda: performance.kernels_alone(rows),
              "published": performance.published_system, "bound": lambda: None}
    return makers[by]()
