"""Plans, and what is measured over several ranks: `plans`, `bench comm`, `bench sweep`, `bench disaggregation`."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gptoss_lab.cli import options
from gptoss_lab.cli.output import note, print_json, print_table, size

if TYPE_CHECKING:
    from gptoss_lab.parallel import Plan

World = Annotated[int, typer.Option(min=1, help="Ranks of a replica.")]
Model = Annotated[str, typer.Option(help="gpt-oss-20b, gpt-oss-120b or nano.")]
PlanName = Annotated[str | None, typer.Option("--plan", help='One plan by its name, such as "EP4 DP1 TP4"; see plans.')]
Repetitions = Annotated[int, typer.Option(min=1, help="Readings of each case.")]


def register(app: typer.Typer, bench: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("plans")(plans)
    bench.command("comm")(bench_comm)
    bench.command("sweep")(bench_sweep)
    bench.command("disaggregation")(bench_disaggregation)


def plan_of(name: str) -> Plan:
    """A plan by its name; one that does not exist is a wrong command line."""
    from gptoss_lab.parallel import Plan, PlanError

    try:
        return Plan.parse(name)
    except PlanError as error:
        raise typer.BadParameter(str(error), param_hint="--plan") from None


def plans(
    model: Model = "gpt-oss-120b", world: World = 8, plan: PlanName = None, as_json: options.Json = False
) -> None:
    """What each rank of a plan holds, reads and receives: all plans of a world, or one plan rank by rank."""
    from gptoss_lab.parallel import share_of, valid_plans
    from gptoss_lab.parallel.plan import check
    from gptoss_lab.parallel.rules import cut_names
    from gptoss_lab.parallel.traffic import exchanges, kv_token_bytes, read_bytes

    config = options.known_preset(model)
    if plan is not None:
        chosen = check(config, plan_of(plan))
        ranks = {str(rank): list(cut_names(share_of(config, chosen, rank))) for rank in range(chosen.world)}
        if as_json:
            print_json(ranks)
        else:
            print_table(f"{config.name}, {chosen}", ("rank", "holds"),
                        ((rank, ", ".join(holds)) for rank, holds in ranks.items()))
        return
    rows = []
    for found in (*valid_plans(config, world), *valid_plans(config, world, sequence_split=True)):
        held = [share_of(config, found, rank) for rank in range(found.world)]
        rows.append({
            "plan": str(found), "largest_rank_bytes": max(read_bytes(config, share) for share in held),
            "kv_bytes_per_token_and_layer": kv_token_bytes(config, found, held[0]),
            "received_bytes_per_token": round(sum(e.step_bytes for e in exchanges(config, found))),
        })
    if as_json:
        print_json(rows)
        return
    print_table(f"{config.name} with FP8 experts over {world} ranks",
                ("plan", "fullest rank reads", "KV bytes a token and layer", "received a token"),
                ((r["plan"], size(r["largest_rank_bytes"]), r["kv_bytes_per_token_and_layer"],
                  size(r["received_bytes_per_token"])) for r in rows))


def bench_comm(
    ranks: Annotated[int, typer.Option(min=2, help="GPUs; without so many, CPU processes over gloo.")] = 2,
    rows: Annotated[list[int] | None, typer.Option(min=1, help="Rows of the sum; repeatable.")] = None,
    repetitions: Repetitions = 20,
    model: Model = "gpt-oss-120b",
    tokens: Annotated[int, typer.Option(min=1, help="Prompt whose keys and values are handed over.")] = 8192,
    out: Annotated[Path, typer.Option(help="A .jsonl file that the rows are added to.")] = Path("results/comm.jsonl"),
) -> None:
    """Check, then time, the end of a sharded layer (all-reduce, residual, RMSNorm) and a hand-over of KV."""
    from gptoss_lab.bench import comm

    comm.run(out, ranks, tuple(rows or comm.ROWS), repetitions, options.known_preset(model).name, tokens)
    note(f"rows added to {out}")


def bench_sweep(
    world: World = 2,
    model: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: 120b, then 20b.")] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Begin nothing that would end later than this.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Short prompts and batches, for CPU ranks.")] = False,
    plan: Annotated[list[str] | None, typer.Option(help="Only this plan; repeatable. Default: all.")] = None,
    comms: Annotated[bool, typer.Option(help="First the combine and the hand-over.")] = True,
    repetitions: Repetitions = 5,
    checkpoint: Annotated[Path | None, typer.Option(help="Its weights. Default: random ones, made in memory.")] = None,
    out: Annotated[Path, typer.Option(help="A .jsonl file; rows that it holds are not measured again.")] = Path(
        "results/sweep.jsonl"),
) -> None:
    """Measure every plan of a world in the order of its worth; writes each row, resumes, checks against one rank."""
    from gptoss_lab.bench import sweep

    models = [options.known_preset(name) for name in model or ("gpt-oss-120b", "gpt-oss-20b")]
    sweep.run(out, models, world, seconds=seconds, repetitions=repetitions, checkpoint=checkpoint, small=small,
              comms=comms, plans=[plan_of(name) for name in plan or ()])
    note(f"rows added to {out}")


def bench_disaggregation(
    model: Model = "gpt-oss-120b",
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Length of the prompt; repeatable.")] = None,
    repetitions: Repetitions = 5,
    small: Annotated[bool, typer.Option("--small", help="Dense weights, for CPU ranks.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Its weights. Default: random ones, made in memory.")] = None,
    out: Annotated[Path, typer.Option(help="A .jsonl file that the rows are added to.")] = Path(
        "results/disaggregation.jsonl"),
) -> None:
    """Prefill on one rank, decode on another: the hand-over, what of it hides behind the prefill, the first token."""
    from gptoss_lab.bench import disaggregation

    disaggregation.run(out, options.known_preset(model), tuple(tokens or (8192,)), repetitions=repetitions,
                       checkpoint=checkpoint, small=small)
    note(f"rows added to {out}")
