"""Rows as lines: the engine's passes with their formats, the fastest whole kernel of each case, and nothing else."""
import pytest
from cost_truth import recorded_kernels, row

from gptoss_lab import results
from gptoss_lab.config import preset
from gptoss_lab.cost import CostError, Plan, Precision, expected_distinct_experts
from gptoss_lab.cost.columns import columns
from gptoss_lab.cost.equations import (
    ceiling_equations,
    engine_rows,
    kernel_equations,
    pass_equation,
    plan_of,
    precision_of,
)
from gptoss_lab.cost.workload import decode, prefill

BIG, ONE = "gpt-oss-120b", Plan()
RECORDED = recorded_kernels()


def test_rows_of_the_truth_fit_the_schema():
    results.validate(row("decode", 0.01, BIG, ONE, 1, 8192))
    results.validate(row("prefill", None, BIG, ONE, 1, 8192))


@pytest.mark.parametrize(("conditions", "precision"), [
    ({}, Precision(mxfp4_unit="fp8")),
    ({"experts": "mxfp4", "projections": "fp8"}, Precision("mxfp4", "fp8", mxfp4_unit="fp8")),
    ({"experts": "dense", "projections": "dense", "kv": "bfloat16"}, Precision("bf16", "bf16", mxfp4_unit="fp8")),
    ({"kv": "fp8", "weights": "random, of the real shapes"}, Precision(kv="fp8", mxfp4_unit="fp8")),
])
def test_formats_of_a_row(conditions, precision):
    assert precision_of(conditions) == precision


def test_a_plan_that_is_not_said_is_one_gpu():
    assert plan_of({}) == Plan() and plan_of({"ep": 4, "dp": 1, "tp": 4}) == Plan(4, 1, 4)


def test_a_format_that_does_not_exist_is_an_error():
    with pytest.raises(CostError, match="experts is 'int4'"):
        precision_of({"experts": "int4"})


def test_only_whole_passes_of_the_engine_on_a_gpu_count():
    good = row("decode", 0.01, BIG, ONE, 1, 8192)
    others = [
        row("decode", None, BIG, ONE, 128, 8192), {**good, "backend": "reference cuda"}, {**good, "gpu": None},
        {**good, "backend": "plain, fp8 experts"}, {**good, "metric": "tokens_per_second"},
        row("prefill", 0.1, BIG, ONE, 1, 8192), row("decode", 0.01, BIG, Plan(2, 1, 2), 1, 8192, sequence_split=True),
        {**good, "conditions": {"model": BIG}}, row("decode", 0.01, "nano", ONE, 1, 8192),
    ]
    assert engine_rows([*others, good], "decode") == [good]
    with pytest.raises(CostError, match="phase is 'both'"):
        engine_rows([], "both")


def test_the_last_row_of_an_identity_counts_and_other_formats_are_other_rows():
    first, second = row("decode", 0.01, BIG, ONE, 1, 8192), row("decode", 0.02, BIG, ONE, 1, 8192)
    packed = row("decode", 0.005, BIG, ONE, 1, 8192, experts="mxfp4")
    short = row("decode", 0.001, BIG, ONE, 1, 8192, layers=4)
    assert engine_rows([first, packed, second, short], "decode") == [second, packed, short]


def test_a_pass_is_the_columns_of_its_work():
    line = pass_equation(row("decode", 0.01, BIG, Plan(4, 1, 4), 16, 8192))
    assert line.seconds == pytest.approx(0.01) and line.weight == 1 and not line.held_out
    assert line.amounts == columns(preset(BIG), decode(8192, 16), Precision(), Plan(4, 1, 4))
    short = pass_equation(row("prefill", 0.01, BIG, ONE, 1, 8192, layers=4))
    assert short.amounts == columns(preset(BIG).with_layers(4), prefill(8192), Precision())
    assert pass_equation(row("decode", 0.01, BIG, Plan(2, 1, 2), 1, 8192)).held_out
    assert pass_equation(row("decode", 0.01, BIG, ONE, 8, 8192)).held_out


def test_experts_that_were_really_used_replace_the_expectation():
    expected = expected_distinct_experts(preset(BIG), 32)
    plain, half = (pass_equation(row("decode", 0.01, BIG, ONE, 32, 8192, **more)).amounts["expert_weights_fp8"]
                   for more in ({}, {"experts_hit": expected / 2}))
    assert half == pytest.approx(plain / 2)


def kernel(suite, case, backend, us, bound=10.0, gpu="NVIDIA H200", **conditions):
    made = row("decode", 1.0, BIG, ONE, 1, 1)
    return {**made, "suite": suite, "case": case, "backend": backend, "metric": "microseconds", "value": us,
            "unit": "us", "raw": [us], "bound": bound, "gpu": gpu, "conditions": conditions}


def test_of_a_kernel_case_the_fastest_that_does_the_whole_work_counts():
    case = {"suite": "attention", "case": "decode/full/8192/batch16", "tokens": 8192, "batch": 16, "window": None}
    rows = [kernel(backend="triton", us=82.0, **case), kernel(backend="xqa", us=77.0, **case),
            kernel(backend="xqa without sinks", us=70.0, **case), kernel(backend="cpu", us=1.0, gpu=None, **case)]
    [line] = kernel_equations(rows, "decode")
    assert line.seconds == pytest.approx(77e-6) and line.weight == 0.1
    assert line.amounts == {"attention_full": pytest.approx(10e-6), "attention_launches": 1.0}
    assert kernel_equations(rows, "prefill") == []


def test_moe_layers_by_phase_and_format():
    of = {"model": BIG, "tokens": 32, "experts_hit": 80, "skew": 0.0}
    rows = [kernel("moe", "layer/E128/T32/uniform", "cuda, fp8 weights", 600.0, **of),
            kernel("moe", "layer/E128/T32/uniform", "cuda, mxfp4 weights", 350.0, **of),
            kernel("moe", "gemm2/E128/T32/uniform", "cuda, fp8 weights", 100.0, **of),
            kernel("moe", "layer/E128/T32/skew1", "cuda, fp8 weights", 10.0, **{**of, "skew": 1.0})]
    lines = {next(iter(line.amounts)): line for line in kernel_equations(rows, "decode")}
    assert set(lines) == {"experts_fp8", "experts_mxfp4"}
    byte_seconds = 80 * 3 * 2880 * 2880 / 4.8e12
    assert lines["experts_fp8"].amounts["expert_weights_fp8"] == pytest.approx(byte_seconds, rel=0.002)
    assert lines["experts_fp8"].amounts["expert_launches"] == 6
    assert lines["experts_fp8"].amounts["experts_fp8"] == pytest.approx(6 * 32 * 4 * 2880**2 / 1979e12)
    assert kernel_equations(rows, "prefill") == []


def sums(backend, us, ranks, tokens=8):
    return kernel("comm", "all-reduce, residual, RMSNorm", backend, us, tp=ranks, tokens=tokens, hidden=2880, batch=1)


def test_sums_count_for_both_phases():
    """Those of two GPUs are seen too: whole passes on two GPUs are what no fit may see."""
    rows = [sums("triton one_shot", 8.0, ranks) for ranks in (2, 4)]
    rows.append(sums("nccl, add and norm apart", 1.0, 4))
    two, four = kernel_equations(rows, "prefill")
    assert not two.held_out and not four.held_out and four.seconds == pytest.approx(8e-6)
    assert four.amounts == {"link": pytest.approx(1.5 * 8 * 5760 / 450e9), "collectives": 1.0,
                            "link_one_shot": pytest.approx(3 * 8 * 5760 / 450e9), "collectives_by_extra_rank": 2.0}
    assert len(kernel_equations(rows, "decode")) == 2


def test_a_librarys_all_reduce_alone_stands_for_gathers():
    [line] = kernel_equations([sums("nccl, all-reduce alone", 204.0, 2, 8192)], "decode")
    assert line.amounts == {"link_gathers": pytest.approx(8192 * 5760 / 450e9), "gathers": 1.0,
                            "collectives_by_extra_rank": 0.0}


def test_a_sum_of_own_rows_has_its_own_bytes_and_does_not_hide_one_of_whole_rows():
    whole, own = kernel_equations([sums("triton one_shot, in place", 148.0, 2, 8192),
                                   sums("triton own rows in e4m3, in place", 126.0, 2, 8192)], "prefill")
    assert whole.amounts["link"] == pytest.approx(8192 * 5760 / 450e9)
    assert own.amounts == {"link": pytest.approx(4096 * (5760 + 2972) / 450e9), "collectives": 1.0,
                           "collectives_by_extra_rank": 0.0}


def test_projections_of_the_layer_benchmark():
    rows = [kernel("profile", "qkv projection/T8192", "e4m3, tiles", 200.0, bound=120.0, tokens=8192),
            kernel("profile", "qkv projection/T8192", "torch bf16", 320.0, bound=240.0, tokens=8192),
            kernel("profile", "rope/T8192", "triton", 20.0, tokens=8192)]
    assert [tuple(line.amounts) for line in kernel_equations(rows, "prefill")] == [
        ("projections_fp8", "projection_launches"), ("projections_bf16", "projection_launches")]


def test_what_is_recorded_today_gives_lines():
    decode_lines = kernel_equations(RECORDED, "decode")
    assert {line.label.split(",")[0] for line in decode_lines} >= {f"attention decode/full/8192/batch{b}"
                                                                    for b in (1, 16, 64, 128)}
    [copy, *_] = [line for line in ceiling_equations(RECORDED, "decode") if "activations" in line.amounts]
    first = next(row for row in RECORDED if row["case"] == "ceiling: device copy")
    assert copy.seconds == 4800 / first["value"] and 1.1 < copy.seconds < 1.3
    assert {n for line in ceiling_equations(RECORDED, "prefill") for n in line.amounts} == {
        "activations", "projections_bf16", "projections_fp8"}
