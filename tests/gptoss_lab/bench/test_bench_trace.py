"""Reading a trace: kinds of kernels, gaps, shares, on a trace written by hand."""
import gzip
import json

import pytest
import torch

from gptoss_lab.bench.trace import Kernel, by_kind, gaps, idle, idle_share, kernels_of, record, span


def event(name, start, duration, category="kernel", **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


TRACE = {"traceEvents": [
    event("_norm_quantise_kernel", 10, 5, grid=[8192, 1, 1], block=[128, 1, 1]),
    event("grouped_gemm", 15, 20, grid=[132, 1, 1], block=[384, 1, 1]),
    event("grouped_gemm", 40, 10, grid=[132, 1, 1], block=[384, 1, 1]),
    event("gluon_prefill_kernel", 45, 15, grid=[132, 1, 1], block=[512, 1, 1]),
    event("Memcpy DtoD", 62, 1, "gpu_memcpy"),
    event("cudaLaunchKernel", 0, 100, "cuda_runtime"),
    {"ph": "M", "name": "process_name"},
]}


def test_kernels_gaps_and_share():
    kernels = kernels_of(TRACE, on_gpu=True)
    assert [k.name for k in kernels][:2] == ["_norm_quantise_kernel", "grouped_gemm"] and len(kernels) == 5
    assert kernels[1].grid == (132, 1, 1) and kernels[1].block == (384, 1, 1)
    assert span(kernels) == 53 and idle(kernels) == [5, 2]                   # 35-40 and 60-62; overlaps count once
    assert gaps(kernels) == [(5, "grouped_gemm", "grouped_gemm"), (2, "gluon_prefill_kernel", "Memcpy DtoD")]
    assert idle_share(kernels) == pytest.approx(7 / 53)


def test_a_kernel_that_overlaps_counts_from_the_end_of_the_one_in_front():
    kernels = kernels_of(TRACE, on_gpu=True)
    assert (kernels[3].start, kernels[3].microseconds) == (50, 10)             # it ran from 45 on, beside the other
    assert sum(k.microseconds for k in kernels) == span(kernels) - sum(idle(kernels))
    within = {"traceEvents": [event("long", 0, 10), event("short", 2, 3), event("next", 12, 1)]}
    assert [k.microseconds for k in kernels_of(within, on_gpu=True)] == [10, 0, 1]


def test_table_by_kind():
    rows = by_kind(kernels_of(TRACE, on_gpu=True))
    assert [row["kind"] for row in rows] == ["e4m3 and MXFP4 products", "attention", "quantise", "copies"]
    assert rows[0]["launches"] == 2 and rows[0]["microseconds"] == 30
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert rows[0]["shapes"] == [{"name": "grouped_gemm", "grid": [132, 1, 1], "block": [384, 1, 1], "launches": 2,
                                  "microseconds": 30.0}]


@pytest.mark.parametrize(("name", "kind"), [
    ("prefill_kernel", "attention"), ("decode_kernel", "attention"), ("merge_kernel", "attention"),
    ("void kernel_mha<...>", "attention"), ("decode_gemm", "e4m3 and MXFP4 products"),
    ("_choose_and_place_kernel", "routing"), ("_place_kernel", "routing"), ("_logits_kernel", "routing"),
    ("_scan_kernel", "routing"), ("_place_scanned_kernel", "routing"),
    ("_combine_kernel", "combine"), ("rope_cache_kernel", "rope and cache"), ("norm_residual_kernel", "norm"),
    ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "dense products"), ("sm90_xmma_gemm_bf16bf16", "dense products"),
    ("void at::native::index_elementwise_kernel", "copies"), ("something_else", "other"),
])
def test_kinds(name, kind):
    assert Kernel(name, 0, 1).kind == kind


def test_operators_stand_in_on_the_cpu(tmp_path):
    file = tmp_path / "trace.json.gz"
    a = torch.randn(64, 64)
    calls = []

    def run():
        calls.append(torch.nn.functional.linear(a, a))

    kernels = record(run, torch.device("cpu"), file)
    assert [k.name for k in kernels if k.kind == "dense products"] == ["aten::linear"]    # the outermost one only
    assert len(calls) == 2                                                       # the first one warms the profiler
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert idle([]) == [] and span([]) == 0 and idle_share([]) == 0
