"""What a machine can do is a pure function of what was probed, so machines are made up here."""
import dataclasses
import subprocess
import sys

import pytest

from gptoss_lab.capabilities import Gpu, Machine, abilities, cache_bytes, fits, probe, weight_bytes
from gptoss_lab.capabilities.machine import parse_gpus, visible
from gptoss_lab.config import preset

MIB = 2**20
H200 = Gpu("NVIDIA H200", (9, 0), 143771 * MIB)
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB)
A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 81920 * MIB)
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24564 * MIB)
B200 = Gpu("NVIDIA B200", (10, 0), 183359 * MIB)
T4 = Gpu("Tesla T4", (7, 5), 15360 * MIB)
ALL = {"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": "0.6.18", "sgl-deep-gemm": "0.1.0"}
SERVER = Machine(
    system="Linux", cpu="Xeon", cores=64, ram=512 * 10**9, disk_free=10**12, python="3.12.3", gpus=(H200,),
    driver="580.65.06", packages=ALL, torch_cuda="13.0", nvcc="13.0", browser="/usr/bin/chromium",
)
LAPTOP = Machine(
    system="Darwin", cpu="Apple M3", cores=8, ram=16 * 10**9, disk_free=50 * 10**9, python="3.12.3",
    packages={"torch": "2.11.0"},
)
GPU_WORK = {
    "Triton kernels on the GPU", "FP8 tensor cores", "own Hopper kernels (FP8 experts)",
    "FlashInfer attention with sinks", "DeepGEMM FP8 experts", "ranks on several GPUs (NCCL)",
}


def cannot(machine):
    return {ability.name: ability.reason for ability in abilities(machine) if not ability.can}


def on(gpu, **changes):
    return dataclasses.replace(SERVER, gpus=(gpu,), **changes)


def row(machine, model, form, place):
    return next(f for f in fits(machine) if (f.model, f.form) == (model, form) and f.place.startswith(place))


def test_one_h200_can_do_all_but_several_gpus():
    assert cannot(SERVER) == {
        "ranks on several GPUs (NCCL)": "there is one GPU; ranks on the CPU (gloo) show the same layouts",
    }
    assert cannot(dataclasses.replace(SERVER, gpus=(H200,) * 8)) == {}


def test_a_laptop_without_gpu_runs_the_nano_checkpoint():
    reasons = cannot(LAPTOP)
    assert set(reasons) == GPU_WORK | {
        "Triton kernels in the interpreter (CPU)", "compiling CUDA sources", "figures as PNG, browser tests",
    }
    assert {reasons[name] for name in GPU_WORK} == {"no NVIDIA GPU is visible"}
    missing = "triton is not installed; it is not published for Darwin"
    assert reasons["Triton kernels in the interpreter (CPU)"] == missing


@pytest.mark.parametrize(("gpu", "lacks"), [
    (H100, set()),
    (A100, {"FP8 tensor cores", "own Hopper kernels (FP8 experts)", "DeepGEMM FP8 experts"}),
    (RTX4090, {"own Hopper kernels (FP8 experts)", "DeepGEMM FP8 experts"}),
    (B200, {"own Hopper kernels (FP8 experts)"}),
    (T4, GPU_WORK - {"ranks on several GPUs (NCCL)"}),
])
def test_other_gpus_are_told_what_they_lack(gpu, lacks):
    reasons = cannot(on(gpu))
    assert set(reasons) - {"ranks on several GPUs (NCCL)"} == lacks
    dotted = ".".join(map(str, gpu.capability))
    assert all(reasons[name].startswith(f"{gpu.name} is SM {dotted}; ") for name in lacks)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"torch_cuda": None, "packages": {**ALL, "torch": "2.13.0+cpu"}},
     "torch 2.13.0+cpu is built without CUDA; install a CUDA build"),
    ({"driver": "550.54.15"}, "driver 550.54.15 is too old for torch's CUDA 13.0; 580 or later is needed"),
    ({"packages": {"triton": "3.6.0"}}, "torch is not installed"),
])
def test_a_gpu_that_torch_cannot_use(changes, reason):
    reasons = cannot(on(H200, **changes))
    assert {reasons[name] for name in GPU_WORK} == {reason}


def test_driver_of_the_same_cuda_major_is_enough():
    assert "FP8 tensor cores" not in cannot(on(H200, driver="525.60.13", torch_cuda="12.8"))


def test_missing_packages_and_compiler_are_named():
    bare = cannot(on(H200, packages={"torch": "2.11.0", "triton": "3.6.0"}, nvcc=None))
    assert bare["FlashInfer attention with sinks"] == "flashinfer-python is not installed"
    assert bare["DeepGEMM FP8 experts"] == "DeepGEMM is not installed (package sgl-deep-gemm)"
    assert "nvcc is not found" in cannot(on(H200, nvcc=None))["FlashInfer attention with sinks"]
    without = cannot(on(H200, packages={"torch": "2.11.0"}))
    assert without["own Hopper kernels (FP8 experts)"] == "triton is not installed"


@pytest.mark.parametrize(("name", "form", "total"), [
    ("gpt-oss-20b", "mxfp4", 13_761_264_768), ("gpt-oss-120b", "mxfp4", 65_248_815_744),
    ("gpt-oss-20b", "fp8", 22_719_216_768 + 4_804_608), ("gpt-oss-120b", "fp8", 118_996_527_744 + 28_827_648),
    ("gpt-oss-20b", "bf16", 41_829_514_368), ("gpt-oss-120b", "bf16", 233_658_313_344),
])
def test_weight_bytes_equal_the_published_totals(name, form, total):
    assert sum(weight_bytes(preset(name), form)) == total


@pytest.mark.parametrize(("tokens", "size"), [
    (1, 73_728), (128, 9_437_184), (129, 9_474_048), (131_072, 4_836_556_800),
])
def test_cache_bytes_of_120b(tokens, size):
    assert cache_bytes(preset("gpt-oss-120b"), tokens) == size


@pytest.mark.parametrize(("gpu", "small", "large"), [
    # which forms of 20b, and of 120b, one GPU holds
    (H200, {"mxfp4", "fp8", "bf16"}, {"mxfp4", "fp8"}),
    (B200, {"mxfp4", "fp8", "bf16"}, {"mxfp4", "fp8"}),
    (H100, {"mxfp4", "fp8", "bf16"}, {"mxfp4"}),
    (A100, {"mxfp4", "fp8", "bf16"}, {"mxfp4"}),
    (RTX4090, {"mxfp4"}, set()),
    (T4, set(), set()),
])
def test_what_one_gpu_holds(gpu, small, large):
    rows = [fit for fit in fits(on(gpu)) if fit.place.startswith(gpu.name)]
    assert {f.form for f in rows if f.fits and f.model == "gpt-oss-20b"} == small
    assert {f.form for f in rows if f.fits and f.model == "gpt-oss-120b"} == large
    assert all((f.need <= f.have) == f.fits for f in rows) and all(f.have == gpu.memory for f in rows)


def test_h100_is_told_plainly_how_120b_in_fp8_would_fit():
    fit = row(on(H100), "gpt-oss-120b", "fp8", "NVIDIA H100")
    assert fit.place == "NVIDIA H100 80GB HBM3 (SM 9.0, 85.5 GB)"
    # 119,025,355,392 + 3e9 + 8192 * 36,864 + 4,718,592 (cache; window layers 18 * 128 * 2048) - 85,520,809,984
    assert fit.note == "36.8 GB are missing; it fits with its experts spread over 2 such GPUs (this machine has 1)"
    two = row(dataclasses.replace(SERVER, gpus=(H100,) * 2), "gpt-oss-120b", "fp8", "NVIDIA H100")
    assert not two.fits and two.note.endswith("(this machine has 2)")
    assert row(on(T4), "gpt-oss-120b", "bf16", "Tesla").note.endswith("spread over 8 such GPUs either")


def test_room_for_cache_is_what_the_weights_leave():
    fit = row(SERVER, "gpt-oss-120b", "fp8", "NVIDIA H200")
    tokens = (143771 * MIB - 119_025_355_392 - 3 * 10**9) // 36_864
    assert fit.note == f"room for {tokens:,} tokens of KV cache (bf16)"


def test_memory_and_disk_of_a_laptop():
    assert row(LAPTOP, "gpt-oss-20b", "mxfp4", "RAM").fits
    assert row(LAPTOP, "gpt-oss-20b", "fp8", "RAM").note == "8.7 GB are missing"
    assert row(LAPTOP, "gpt-oss-20b", "fp8", "disk").fits
    assert not row(LAPTOP, "gpt-oss-120b", "fp8", "disk").fits


def test_nvidia_smi_output_is_read():
    text = "NVIDIA H200, 9.0, 143771, 580.65.06\nNVIDIA H200, 9.0, 143771, 580.65.06\n"
    assert parse_gpus(text) == ((H200, H200), "580.65.06")
    assert parse_gpus("") == ((), None)
    assert parse_gpus("No devices were found\nNVIDIA H200, [N/A], [Unknown Error], 580.65.06") == ((), None)


@pytest.mark.parametrize(("setting", "left"), [
    (None, "abc"), ("", ""), ("-1", ""), ("1", "b"), ("2,0", "ca"), ("0,7,1", "a"), ("GPU-5f1e", "abc"),
])
def test_hidden_gpus_do_not_count(setting, left):
    gpus = tuple(Gpu(name, (9, 0), 1) for name in "abc")
    assert "".join(gpu.name for gpu in visible(gpus, setting)) == left


def test_probe_of_this_machine(tmp_path):
    machine = probe(tmp_path / "not" / "there")
    assert machine.cores >= 1 and machine.ram > 10**9 and machine.disk_free > 0
    assert machine.python == ".".join(map(str, sys.version_info[:3])) and "torch" in machine.packages
    assert next(a for a in abilities(machine) if a.name == "notebooks on the nano checkpoint").can


def test_probe_imports_neither_torch_nor_triton():
    code = (
        "import sys; from gptoss_lab.capabilities import probe, abilities, fits; m = probe(); abilities(m); fits(m); "
        "print(sorted({'torch', 'triton', 'flashinfer', 'deep_gemm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
