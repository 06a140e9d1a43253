"""What of the suite can run on a machine, and what stands in the way of the rest: one line each."""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.capabilities.machine import Machine

DRIVER_FOR_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest NVIDIA driver branch that runs programs of a CUDA major version (source: NVIDIA's CUDA release notes)."""


@dataclass(frozen=True)
class Ability:
    """Something the suite does, whether it can be done here, and the reason in one line."""

    name: str
    can: bool
    reason: str


def abilities(machine: Machine) -> list[Ability]:
    """What can run on this machine, from what always can to what needs most."""
    found = {"nvcc": machine.nvcc, "browser": machine.browser, "gpus": len(machine.gpus)}
    missing = [(name, obstacle(machine), good.format_map(found)) for name, obstacle, good in _ABILITIES]
    return [Ability(name, why_not is None, good if why_not is None else why_not) for name, why_not, good in missing]


def _no_torch(machine: Machine) -> str | None:
    return None if "torch" in machine.packages else "torch is not installed"


def _no_triton(machine: Machine) -> str | None:
    if "triton" in machine.packages:
        return _no_torch(machine)
    elsewhere = "" if machine.system == "Linux" else f"; it is not published for {machine.system}"
    return f"triton is not installed{elsewhere}"


def _no_gpu(machine: Machine) -> str | None:
    """Why torch cannot use an NVIDIA GPU here."""
    if not machine.gpus:
        return "no NVIDIA GPU is visible"
    if missing := _no_torch(machine):
        return missing
    if machine.torch_cuda is None:
        return f"torch {machine.packages['torch']} is built without CUDA; install a CUDA build"
    oldest = DRIVER_FOR_CUDA.get(int(machine.torch_cuda.split(".")[0]))
    if oldest is not None and machine.driver is not None and int(machine.driver.split(".")[0]) < oldest:
        return f"driver {machine.driver} is too old for torch's CUDA {machine.torch_cuda}; {oldest} or later is needed"
    return None


def _no_sm(machine: Machine, accepts: str, reason: str) -> str | None:
    """Why no GPU here has a capability of `accepts`: "8.0+" (at least), "9.0" (exactly), or several with commas."""
    if missing := _no_gpu(machine):
        return missing
    if any(_accepted(gpu.capability, choice) for gpu in machine.gpus for choice in accepts.split(",")):
        return None
    major, minor = machine.gpus[0].capability
    return f"{machine.gpus[0].name} is SM {major}.{minor}; {reason}"


def _accepted(capability: tuple[int, int], choice: str) -> bool:
    wanted = tuple(int(part) for part in choice.rstrip("+").split("."))
    return capability >= wanted if choice.endswith("+") else capability == wanted


def _no_gpu_triton(machine: Machine) -> str | None:
    return _no_sm(machine, "8.0+", "Triton's kernels here need 8.0 (Ampere) or later") or _no_triton(machine)


def _no_fp8(machine: Machine) -> str | None:
    reason = "FP8 tensor cores came with 8.9 (Ada) and 9.0 (Hopper); weights are decoded to bf16 instead"
    return _no_sm(machine, "8.9+", reason)


def _no_hopper(machine: Machine) -> str | None:
    reason = "these kernels use wgmma, an instruction of 9.0 (Hopper) alone"
    return _no_sm(machine, "9.0", reason) or _no_triton(machine)


def _no_flashinfer(machine: Machine) -> str | None:
    if missing := _no_sm(machine, "8.0+", "FlashInfer needs 8.0 (Ampere) or later; its FA3 kernels 9.0"):
        return missing
    if "flashinfer-python" not in machine.packages:
        return "flashinfer-python is not installed"
    return None if machine.nvcc else "nvcc is not found; FlashInfer compiles its kernels with it at first use"


def _no_deepgemm(machine: Machine) -> str | None:
    if missing := _no_sm(machine, "9.0,10.0", "DeepGEMM has kernels for 9.0 (Hopper) and 10.0 (Blackwell)"):
        return missing
    if not {"sgl-deep-gemm", "deep-gemm"} & set(machine.packages):
        return "DeepGEMM is not installed (package sgl-deep-gemm)"
    return None if machine.nvcc else "nvcc is not found; DeepGEMM compiles its kernels with it at first use"


def _no_nccl(machine: Machine) -> str | None:
    if missing := _no_gpu(machine):
        return missing
    return None if len(machine.gpus) > 1 else "there is one GPU; ranks on the CPU (gloo) show the same layouts"


def _no_nvcc(machine: Machine) -> str | None:
    return None if machine.nvcc else "nvcc is not found (looked at CUDA_HOME and PATH)"


def _no_browser(machine: Machine) -> str | None:
    return None if machine.browser else "no Chromium or Chrome is found; figures stay interactive, without their PNG"


_ABILITIES = (
    ("notebooks on the nano checkpoint", _no_torch, "CPU and the reference kernels are enough"),
    ("reading, converting and inspecting checkpoints", _no_torch, "CPU is enough; disk space is below"),
    ("ranks on the CPU (gloo)", _no_torch, "torch.distributed with gloo"),
    ("Triton kernels in the interpreter (CPU)", _no_triton, "set TRITON_INTERPRET=1"),
    ("Triton kernels on the GPU", _no_gpu_triton, "SM 8.0 or later, triton installed"),
    ("FP8 tensor cores", _no_fp8, "SM 8.9 or later"),
    ("own Hopper kernels (FP8 experts)", _no_hopper, "SM 9.0, triton installed"),
    ("FlashInfer attention with sinks", _no_flashinfer, "package and nvcc found"),
    ("DeepGEMM FP8 experts", _no_deepgemm, "package and nvcc found"),
    ("ranks on several GPUs (NCCL)", _no_nccl, "{gpus} GPUs"),
    ("compiling CUDA sources", _no_nvcc, "nvcc {nvcc}"),
    ("figures as PNG, browser tests", _no_browser, "{browser}"),
)
