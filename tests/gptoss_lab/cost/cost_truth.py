"""Result rows of an imaginary engine whose times are a known sum: what a calibration has to find again."""
import numpy as np

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.cost import Plan, Precision
from gptoss_lab.cost.columns import columns
from gptoss_lab.cost.equations import kernel_equations
from gptoss_lab.cost.workload import decode, prefill

PREFILL = {"projections_bf16": 1.3, "projections_fp8": 1.6, "experts_fp8": 1.8, "expert_weights_fp8": 0.6,
           "attention_full": 2.0, "attention_window": 6.0, "activations": 3.0, "link": 1.5, "link_gathers": 2.0,
           "layers": 50e-6, "attention_launches": 5e-6, "expert_launches": 2e-6, "collectives": 8e-6, "gathers": 12e-6,
           "passes": 1e-3}
DECODE = {"projections_bf16": 1.2, "projections_fp8": 1.3, "experts_fp8": 2.5, "expert_weights_fp8": 1.25,
          "attention_full": 1.15, "attention_window": 3.0, "activations": 3.0, "link": 1.5, "link_gathers": 2.0,
          "layers": 20e-6, "attention_launches": 12e-6, "expert_launches": 5e-6, "collectives": 8e-6, "gathers": 12e-6,
          "passes": 1e-4}
TRUTH = {"prefill": PREFILL, "decode": DECODE}
EVERYWHERE = [Plan(n, 1, n) for n in (1, 2, 4, 8)]
MODELS = ("gpt-oss-20b", "gpt-oss-120b")


def recorded_kernels():
    """Recorded rows of attention, ceilings and the server alone: a state in which no engine has been measured."""
    return [r for r in results.read_rows(results.recorded_folder())
            if r["suite"] in ("attention", "serve") or r["case"].startswith("ceiling")]


def row(suite, seconds, model, plan, batch, tokens, **conditions):
    """A row as the benchmarks of the engine write it."""
    metric, unit, scale = ("seconds", "s", 1.0) if suite == "prefill" else ("ms_per_step", "ms", 1e3)
    value = None if seconds is None else seconds * scale
    return {
        "suite": suite, "case": suite, "backend": "fast, fp8 experts, dense projections", "metric": metric,
        "value": value, "unit": unit, "bound": None, "peer": None, "repetitions": 5, "statistic": "median",
        "raw": [] if value is None else [value], "spread": None, "gpu": "NVIDIA H200", "driver": "580", "clocks": None,
        "versions": {}, "commit": "0", "date": "2026-12-01", "command": "bench",
        "conditions": {"model": model, "ep": plan.ep, "dp": plan.dp, "tp": plan.tp, "batch": batch, "tokens": tokens,
                       "experts": "fp8", "projections": "dense", "kv": "bfloat16", "weights": "random",
                       **({"failed": "no room"} if value is None else {}), **conditions},
    }


def true_seconds(suite, model, plan, batch, tokens, truth=None):
    """What the imaginary engine takes."""
    work = (prefill if suite == "prefill" else decode)(tokens, batch)
    amounts = columns(preset(model), work, Precision(), plan)
    return sum(value * amounts[name] for name, value in (truth or TRUTH[suite]).items())


def rows_of(suite, plans=EVERYWHERE, noise=0.02, seed=0, change=lambda seconds, plan: seconds, **truth):
    """Rows of both models at the lengths and batches of the benchmarks, each off by `noise` (one deviation)."""
    rng = np.random.default_rng(seed)
    cases = ([(tokens, 1) for tokens in (8192, 32768, 65536, 128000)] + [(8192, batch) for batch in (2, 4, 8)]
             if suite == "prefill" else [(t, b) for t in (8192, 32768) for b in (1, 8, 32, 128)])
    return [
        row(suite, change(true_seconds(suite, model, plan, batch, tokens, **truth), plan)
            * float(np.exp(noise * rng.normal())), model, plan, batch, tokens)
        for model in MODELS for plan in plans for tokens, batch in cases
    ]


def kernel_rows(noise=0.02, seed=7):
    """Kernels of the imaginary engine timed alone, and a library's all-reduce, as their benchmarks write them."""
    rng, rows = np.random.default_rng(seed), []
    for form, lengths, batches in (("prefill", (8192, 32768, 128000), (1,)), ("decode", (8192, 32768), (1, 16, 64))):
        for tokens in lengths:
            for batch in batches:
                for window in (None, 128):
                    name = "attention_full" if window is None else "attention_window"
                    work = (prefill if form == "prefill" else decode)(tokens, batch)
                    bound = columns(preset(MODELS[1]), work)[name] / 18
                    rows.append(_kernel("attention", f"{form}/{name}/{tokens}/{batch}", bound * 1e6, batch=batch,
                                        tokens=tokens, window=window))
    for model in MODELS:
        for tokens in (1, 32, 128, 2048, 8192, 32768):
            rows.append(_kernel("moe", f"layer/{model}/T{tokens}/uniform", 1.0, model=model, tokens=tokens))
    for ranks in (2, 4, 8):
        for tokens in (1, 32, 1024, 8192):
            for backend in ("triton", "nccl, all-reduce alone"):
                rows.append(_kernel("comm", "all-reduce, residual, RMSNorm", 1.0, backend, tp=ranks, tokens=tokens,
                                    hidden=2880))
    for made in rows:
        for phase, truth in TRUTH.items():
            for line in kernel_equations([made], phase):
                seconds = sum(truth.get(name, 0.0) * amount for name, amount in line.amounts.items())
                made["value"] = 1e6 * seconds * float(np.exp(noise * rng.normal()))
    return rows


def _kernel(suite, case, bound_us, backend="triton", **conditions):
    made = row("decode", 1.0, MODELS[1], Plan(), 1, 1)
    return {**made, "suite": suite, "case": case, "backend": backend, "metric": "microseconds", "value": 1.0,
            "unit": "us", "bound": bound_us, "conditions": conditions}
