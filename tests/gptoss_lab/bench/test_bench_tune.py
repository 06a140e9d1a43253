"""The tuning bench: which launches are compared, that each computes the right thing, and what is written of them."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptoss_kernels.moe import gemm_cuda
from gptoss_kernels.moe.combine import combine_config
from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.projection.norm import norm_residual_config
from gptoss_kernels.quant.norm_quant import empty_scales, norm_quantise_config
from gptoss_lab.bench import tune
from gptoss_lab.bench.tune_launches import CASES, KERNELS, OURS, THEIRS, Case, chosen, launches
from gptoss_lab.cli.main import main

HERE = Path(__file__).parent
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


def test_every_kernel_has_a_case_and_every_case_one_chosen_launch():
    assert {case.kernel for case in CASES} == set(KERNELS)
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        found = launches(case)
        assert sum(launch.chosen for launch in found) == 1 and len(found) >= 2
        assert len({launch.name for launch in found}) == len(found)
        assert all(launch.chosen == (launch.made_for == OURS) for launch in found if "attention" not in case.kernel)
    with pytest.raises(ValueError, match="kernel is 'gemm'; one of gate/up product"):
        launches(Case("gemm", 1))


def test_what_suits_7168_fits_it_and_what_is_chosen_fits_2880():
    by_made = {launch.made_for: launch.options for launch in launches(Case("down product", 8192, 128))
               if not launch.options["padded"]}
    theirs, ours = by_made[THEIRS]["columns"], by_made[OURS]["columns"]
    assert 7168 % theirs == 4096 % theirs == 0 and 2880 % ours == 5760 % ours == 0 and 2880 % theirs and 7168 % ours
    for case in (Case("norm and quantise", 8192, 128), Case("norm and residual", 8192), Case("combine", 8192, 128)):
        lanes = {one.made_for: one.name.split(",")[0] for one in launches(case)}
        assert (lanes[THEIRS], lanes[OURS]) == ("8192 lanes", "4096 lanes")
    chunked = {one.made_for: one.options for one in launches(Case("norm and quantise", 8192))}
    assert chunked[OURS]["GROUPS"] * 128 * 3 >= 2880 and chunked[THEIRS]["maxnreg"] > chunked[OURS]["maxnreg"]
    few = {launch.made_for: launch.options["BLOCK_N"] for launch in launches(Case("few-token output", 8))}
    assert few == {THEIRS: 32, OURS: 16}


def test_the_chosen_launches_are_the_ones_the_kernels_take():
    """Otherwise "after" would be something that never runs."""
    for tokens in (1, 8192):
        for experts in (0, 128):
            assert chosen(Case("norm and quantise", tokens, experts)).options == norm_quantise_config(
                tokens, 2880, experts > 0)
        assert chosen(Case("combine", tokens, 128)).options == combine_config(tokens, 2880)
        assert chosen(Case("norm and residual", tokens)).options == norm_residual_config(2880)
    assert chosen(Case("down product", 8192, 128)).options["columns"] == gemm_cuda.CHOSEN_COLUMNS == 192
    names = [chosen(Case("norm and quantise", 8192, experts)).name for experts in (0, 128)]
    assert [*names, chosen(Case("combine", 8192, 128)).name] == [
        "1024 lanes, 2 warps", "4096 lanes, 4 warps", "4096 lanes, 4 warps"]


def test_every_launch_gives_the_right_result_without_a_gpu():
    """Triton interpreted, the CUDA product in plain torch; a product without its bias is refused."""
    done = subprocess.run([sys.executable, str(HERE / "tune_on_cpu.py")], capture_output=True, text=True, timeout=400,
                          env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert set(lines[:-1]) == set(KERNELS) and lines[-1] == "refused: down product"


def test_rows_and_table():
    case = Case("down product", 8192, 128)
    names = [launch.name for launch in launches(case)]
    readings = {name: [1e-6 * t, 2e-6 * t, 3e-6 * t] for name, t in zip(names, (40, 30, 20, 25), strict=True)}
    rows = tune.rows_of(case, readings, 10.0, None, seed=3)
    assert [row["value"] for row in rows] == pytest.approx([80, 60, 40, 50])
    assert rows[2]["conditions"]["chosen"] and rows[2]["peer"] == {"name": names[0], "value": pytest.approx(80)}
    assert all(row["peer"] == {"name": "192 columns", "value": pytest.approx(40)} for row in (*rows[:2], rows[3]))
    assert rows[0]["suite"] == "profile" and rows[0]["case"] == "tune: down product/E128/T8192"
    assert rows[0]["conditions"]["seed"] == 3 and rows[0]["conditions"]["launch"] == {"columns": 256, "padded": True}
    text = tune.table(rows).splitlines()
    assert len(text) == 4 and "2.000x" in text[0] and "* 192 columns" in text[2] and "25.0%" in text[2]


def test_without_a_gpu_it_says_what_is_missing(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="the tuning benchmark cannot run here: it needs an NVIDIA GPU"):
        tune.run()
    out = tmp_path / "tune.jsonl"
    assert main(["bench", "tune", "--only", "combine", "--out", str(out)]) == 1 and not out.exists()
    assert capsys.readouterr().err.splitlines() == [
        "gptoss-lab: the tuning benchmark cannot run here: it needs an NVIDIA GPU and tensors on it"]
    assert main(["bench", "tune", "--only", "nothing"]) != 0


def test_a_tile_width_that_does_not_exist_is_refused():
    a, b = torch.zeros(128, 64).to(torch.float8_e4m3fn), torch.zeros(1, 128, 64).to(torch.float8_e4m3fn)
    counts, scales = torch.tensor([128], dtype=torch.int32), (empty_scales(128, 64, "cpu"), torch.ones(1, 1, 1))
    for columns, swiglu, right in ((160, False, "128, 192 or 256"), (192, True, "256")):
        with pytest.raises(ValueError, match=f"tiles of {columns} columns; {right} is needed"):
            gemm_cuda.grouped_gemm(a, scales[0], b, scales[1], None, counts, swiglu=swiglu, columns=columns)


@needs_nvcc
@pytest.mark.parametrize(("n", "k", "experts"), [(2880, 2880, 128), (2880, 4096, 1)])
@pytest.mark.parametrize("columns", gemm_cuda.TILE_COLUMNS)
def test_every_tile_width_compiles_without_spills(n, k, experts, columns):
    defines = gemm_cuda.gemm_defines(n, k, experts, swiglu=False, bias=True, columns=columns)
    _, used = driver.compile_nvcc("grouped_gemm.cu", dict(defines))
    assert used["spill_stores"] == used["spill_loads"] == 0 and used["registers"] <= 168


@needs_nvcc
def test_the_default_width_is_the_chosen_one():
    same = [driver.compile_nvcc("grouped_gemm.cu", dict(gemm_cuda.gemm_defines(2880, 2880, 32, swiglu=False, bias=True,
                                                                               columns=columns)))[0]
            for columns in (None, gemm_cuda.CHOSEN_COLUMNS)]
    assert same[0] == same[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: interpreted and plain forms stand in")
@pytest.mark.parametrize("case", [Case(kernel, 32 if "few" in kernel else 2048, 32, batch=8) for kernel in KERNELS],
                         ids=lambda case: case.kernel)
def test_every_launch_gives_the_right_result_on_a_gpu(case):
    runs = tune.runs_of(case, seed=5)
    assert list(runs.calls) == list(launches(case)) and runs.bound_seconds > 0
