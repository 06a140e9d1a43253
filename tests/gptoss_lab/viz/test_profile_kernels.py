"""The list of launches: its FLOPs and bytes are the cost model's, its counts the forward's, its rows the benches'."""
import dataclasses
from collections import Counter

import pytest
import torch

from gptoss_lab.bench import attention, layer, moe, tune_launches
from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.config import preset
from gptoss_lab.cost import decode_bound, prefill_bound, workload
from gptoss_lab.cost.parts import forward_parts
from gptoss_lab.cost.precision import SERVED
from gptoss_lab.model.fast import FastTransformer, lay_out, make_pool
from gptoss_lab.results import make_row
from gptoss_lab.viz import profile_kernels
from gptoss_lab.viz.profile_kernels import Launch

SMALL, BIG = preset("gpt-oss-20b"), preset("gpt-oss-120b")
PARTS = {"QKV": "qkv_projection", "output": "output_projection", "gate/up": "experts_gate_up", "down": "experts_down",
         "attention, full": "attention_full", "attention, window": "attention_window", "head": "head"}


def steps(config):
    return [("prefill", profile_kernels.prefill(config, 8192), workload.prefill(8192)),
            *((f"decode {b}", profile_kernels.decode(config, 8192, b), workload.decode(8192, b)) for b in (1, 8, 32))]


@pytest.mark.parametrize("config", [SMALL, BIG], ids=lambda c: c.name)
def test_flop_and_bytes_are_those_of_the_cost_model(config):
    for name, launches, work in steps(config):
        parts = {part.name: part for part in forward_parts(config, work, SERVED)}
        for what, part in PARTS.items():
            mine = [one for one in launches if one.what.startswith(what)]
            assert len(mine) == 1, (name, what)
            assert mine[0].times * mine[0].flop == pytest.approx(parts[part].flop), (name, what)
            assert mine[0].times * mine[0].bytes > parts[part].memory_bytes * 0.999, (name, what)
        router = [one for one in launches if one.kind == "routing" and one.flop]
        assert sum(one.times * one.flop for one in router) == pytest.approx(parts["router"].flop)


@pytest.mark.parametrize("config", [SMALL, BIG], ids=lambda c: c.name)
def test_the_sum_of_the_bounds_is_above_the_bound_of_the_step_and_near_it_where_weights_are_all(config):
    for (_, launches, _), bound in zip(steps(config), (
            prefill_bound(config, 8192, 1, SERVED), *(decode_bound(config, 8192, b, SERVED) for b in (1, 8, 32))),
            strict=True):
        total = 1e-6 * sum(one.times * one.bound_us for one in launches)
        assert bound.seconds <= total
        if "decode_gemm" in {one.kernel for one in launches}:
            assert total < 1.1 * bound.sequential_seconds


def test_grids_by_hand():
    first = {one.what: one for one in profile_kernels.prefill(BIG, 8192)}
    assert first["norm and quantise, before the experts"].grid == (8192,)
    assert first["place the rows' scales"].grid == ((8192 * 4 // 128 + 127) * 128 // 32,)
    assert first["combine, residual included"].grid == (8192, 1)
    assert first["first norm and quantise, before QKV"].threads == 64
    assert first["rope and cache, full"].grid == (8192 // 8, 8 + 2)             # 8 tokens of 8 heads of 32 pairs
    assert first["attention, window"].grid == (8192 // 8, 8) and first["attention, full"].grid == (132,)
    assert first["choose experts"].grid == (128,) and first["gate/up product"].threads == 384
    one, few, many = ({x.what: x for x in profile_kernels.decode(BIG, 8192, b)} for b in (1, 3, 32))
    assert one["QKV, norm included"].grid == (5120 // 16,) and one["output, residual included"].grid == (2880 // 16,)
    assert one["attention, full"].grid == (66, 8, 1) and many["attention, full"].grid == (2, 8, 32)
    logits = "router logits and quantised rows"                     # 2 or 8 experts of 1 or 2 tokens, and the rows
    assert one["attention, window"].grid == (1, 8, 1) and one[logits].grid == (1, 128 // 2 + 1)
    assert many[logits].grid == (32 // 2, 128 // 8 + 1) and few["choose and place"].grid == (1,)
    assert many["choose experts"].grid == (32,) and many["combine, residual included"].grid == (32, 3)
    assert few["gate/up product"].threads == 288 and "gate/up product" not in one
    assert one["gate/up product, choice included"].grid == (4 * 5760 // 16,)    # of every expert of the token
    assert one["down product, sum included"].grid == (2880 // 8,)
    routing = {tokens: [(x.kernel, x.grid) for x in profile_kernels.prefill(BIG, tokens) if x.kind == "routing"]
               for tokens in (8192, 32768)}
    assert routing == {8192: [("_choose_kernel", (128,)), ("_place_kernel", (128,))], 32768: [
        ("_choose_kernel", (512,)), ("_scan_kernel", (16,)), ("_place_scanned_kernel", (512,))]}


def test_the_output_product_of_a_prompt_reads_and_writes_the_stream():
    bytes_of = {x.what: x.bytes for x in profile_kernels.prefill(BIG, 8192)}
    assert bytes_of["output product, residual included"] == pytest.approx(
        8192 * (4096 + 4 * 32 + 2 * 2 * 2880) + 2880 * 4096, rel=1e-3)
    assert not any("add the residual" in what for what in bytes_of)


def test_bounds_and_limits():
    one = Launch("x", "decode_gemm", 2, (132,), 288, "fp8", 1979e12 * 3e-6, 4.8e12 * 2e-6)
    assert one.bound_us == pytest.approx(3) and one.limited_by == "arithmetic"
    other = dataclasses.replace(one, unit="bf16", bytes=4.8e12 * 7e-6)
    assert other.bound_us == pytest.approx(7) and other.limited_by == "bytes"
    assert dataclasses.replace(one, unit="bf16").bound_us == pytest.approx(3 * 1979 / 989)
    assert dataclasses.replace(one, unit="fp32", flop=67e12 * 9e-6).bound_us == pytest.approx(9)


def test_the_ratio_of_a_decode_is_its_batch():
    intensity = {b: next(x for x in profile_kernels.decode(SMALL, 8192, b) if x.what == "QKV, norm included").intensity
                 for b in (1, 8, 32)}
    assert intensity[8] / intensity[1] == pytest.approx(8, rel=0.05)
    assert intensity[32] / intensity[1] == pytest.approx(32, rel=0.1)


def test_what_it_does_not_know_is_refused():
    with pytest.raises(ValueError, match="tokens is 128; a prefill here has more than 128"):
        profile_kernels.prefill(BIG, 128)
    for batch in (0, 33):
        with pytest.raises(ValueError, match=f"batch is {batch}; 1 to 32 sequences"):
            profile_kernels.decode(BIG, 8192, batch)


def known_sources():
    """Every (suite, case) that a bench writes, with the backends of the tuning bench."""
    found = {("attention", case.name) for case in attention.CASES}
    found |= {("moe", f"{kernel}/{case.name}") for case in moe.CASES
              for kernel in ("gemm1 with swiglu", "gemm2", "quantise", "combine")}
    found |= {("profile", f"{kernel}/{case.name}") for case in layer.CASES
              for kernel in ("norm and quantise", "rope and cache", "qkv projection", "out projection")}
    return found | {("profile", case.name) for case in tune_launches.CASES}


def test_every_source_is_one_that_a_bench_writes():
    tuned = {case.name: {one.name: one.chosen for one in tune_launches.launches(case)} for case in tune_launches.CASES}
    for _, launches, _ in steps(BIG):
        for launch in launches:
            for suite, case, backend in launch.sources:
                if case in tuned:
                    assert tuned[case][backend], (case, backend)                 # and it is the chosen launch
                elif not case.startswith(("decode/full/8192/", "decode/window128/8192/")):    # at other batches too
                    assert (suite, case) in known_sources(), case


def test_the_best_source_wins_and_other_metrics_do_not_count():
    launch = next(x for x in profile_kernels.prefill(BIG, 8192) if x.what == "combine, residual included")
    (_, first, name), (_, second, backend) = launch.sources
    rows = [make_row("moe", second, backend, "microseconds", [5.0], "us"),
            make_row("moe", second, backend, "gb_per_s", [4000.0], "GB/s")]
    assert launch.measured([]) is None and launch.measured(rows)["value"] == 5
    rows.append(make_row("profile", first, name, "microseconds", [4.0], "us"))
    assert launch.measured(rows)["value"] == 4
    rows.append(make_row("profile", first, name, "microseconds", [], "us", failed="broken"))
    assert launch.measured(rows)["value"] == 4


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """How often a layer's operations are called in a prefill and in a decode step of the real forward, on the CPU."""
    config = dataclasses.replace(preset("nano"), num_layers=4, hidden_size=64, intermediate_size=64, num_heads=4,
                                 num_kv_heads=2, head_dim=32, vocab_size=50, sliding_window=16, eos_token_ids=(3,),
                                 pad_token_id=0)
    folder = tmp_path_factory.mktemp("counted") / "model"
    synth(config, folder)
    weights = lay_out(open_checkpoint(folder), "cpu", torch.float32, experts="fp8", projections="fp8")
    model = FastTransformer(weights, make_pool(weights, tokens=400, sequences=2), graphs=False)
    calls, forward = Counter(), model._forward

    def counting(name, function):
        def run(*args, **more):
            calls[name] += 1
            return function(*args, **more)
        return run

    for name in ("_norm", "_rope", "_fp8", "_few", "_moe"):
        setattr(forward, name, counting(name, getattr(forward, name)))
    cache = model.new_cache()
    model(torch.arange(200) % 50, [200], [cache])
    prompt = Counter(calls)
    calls.clear()
    model(torch.tensor([1]), [1], [cache])
    return config, prompt, Counter(calls)


def test_launches_are_as_many_as_the_forward_makes(counted):
    """An operation is so many launches: e4m3 product 1, and 2 where nothing before it has quantised; MoE 7, of one
    token 3; the others 1."""
    config, prompt, step = counted
    n = config.num_layers
    assert prompt == {"_fp8": 2 * n, "_rope": n, "_moe": n, "_norm": 1} and step == {
        "_few": 2 * n, "_rope": n, "_moe": n, "_norm": 1}
    listed = Counter()
    for launch in profile_kernels.prefill(config, 200):
        listed[launch.kernel] += launch.times
    products = listed["grouped_gemm"] - 2 * n                                  # two are the experts'
    assert products == prompt["_fp8"] and listed["_norm_quantise_kernel"] == 1 + n
    assert listed["rope_cache_kernel"] == n and listed["norm_residual_kernel"] == 1
    assert listed["gluon_prefill_kernel"] + listed["prefill_kernel"] == n
    routed = sum(listed[k] for k in ("_choose_kernel", "_place_kernel", "_combine_kernel", "_combine_norm_kernel"))
    assert listed["_place_scales_kernel"] == n and routed + 4 * n == 7 * prompt["_moe"]
    later = Counter()
    for launch in profile_kernels.decode(config, 8192, 1):
        later[launch.kernel] += launch.times
    assert later["few_linear"] == step["_few"] and later["decode_kernel"] == n
    assert later["merge_kernel"] == n // 2 and later["few_experts"] == 2 * n
    assert later["_logits_kernel"] == n and not later["_combine_kernel"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the forward's calls are counted instead")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_trace_shows_the_listed_launches(phase):
    """Names, counts and grids of our own kernels in a trace of two layers, against the list."""
    from gptoss_lab.bench.profile import _decode, _prefill
    from gptoss_lab.bench.trace import record
    from gptoss_lab.viz import profile_live

    of = profile_live.subject(None, torch.device("cuda"))
    of = dataclasses.replace(of, config=SMALL.with_layers(2))
    step = (_prefill if phase == "prefill" else _decode)(of, profile_live.weights(of), 1024, 1)
    step()
    seen = Counter((k.name, k.grid) for k in record(step, of.device))
    listed = profile_kernels.prefill(of.config, 1024) if phase == "prefill" else profile_kernels.decode(
        of.config, 1024, 1)
    for launch in listed:
        if launch.grid and launch.kernel not in ("decode_kernel", "merge_kernel"):      # a vendor's where it is there
            grid = (*launch.grid, 1, 1)[:3]
            assert seen[launch.kernel, grid] >= launch.times, (launch.what, grid, sorted(seen))
