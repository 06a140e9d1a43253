"""The facts about a machine, and the probe that finds them without importing torch."""
from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

GB = 10**9
PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "deep-gemm", "transformers", "openai-harmony")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")


@dataclass(frozen=True)
class Gpu:
    """name as the driver says it, capability (major, minor), memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int

    @property
    def label(self) -> str:
        """Name, SM and memory, to print."""
        return f"{self.name} (SM {self.capability[0]}.{self.capability[1]}, {self.memory / GB:.1f} GB)"


@dataclass(frozen=True)
class Machine:
    """What `probe` found. Sizes in bytes; None where something is not there.

    system: "Linux", "Darwin", "Windows". cores: those this process may use. ram: total, or the container's limit.
    packages: version of each of `PACKAGES` that is installed. torch_cuda: CUDA version torch was built for.
    nvcc: release of the compiler found. browser: path of a Chromium.
    """

    system: str
    cpu: str
    cores: int
    ram: int
    disk_free: int
    python: str
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    nvcc: str | None = None
    browser: str | None = None


def probe(folder: str | Path = ".") -> Machine:
    """Look at this machine. folder: whose disk counts; the first of its parents that exists is asked."""
    gpus, driver = _gpus()
    return Machine(
        system=platform.system(), cpu=_cpu(), cores=_cores(), ram=_ram(), disk_free=_disk_free(Path(folder).absolute()),
        python=platform.python_version(), gpus=gpus, driver=driver, packages=_packages(), torch_cuda=_torch_cuda(),
        nvcc=_nvcc(), browser=_browser(),
    )


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str | None]:
    """GPUs and driver from `nvidia-smi --query-gpu=name,compute_cap,memory.total,driver_version`, CSV, no units."""
    gpus, driver = [], None
    for line in text.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 3)]
        if len(parts) != 4 or not re.fullmatch(r"\d+\.\d+", parts[1]) or not parts[2].isdigit():
            continue  # a GPU that the driver cannot describe (MIG parent, lost from the bus) cannot be used either
        major, minor = parts[1].split(".")
        gpus.append(Gpu(parts[0], (int(major), int(minor)), int(parts[2]) * 2**20))
        driver = parts[3]
    return tuple(gpus), driver


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits"]
    gpus, driver = parse_gpus(_output(query) or "")
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")), driver


def visible(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[Gpu, ...]:
    """Those GPUs that CUDA_VISIBLE_DEVICES leaves: as CUDA reads it, up to the first index that does not exist."""
    if setting is None or "GPU-" in setting or "MIG-" in setting:  # names of devices: nvidia-smi's order says nothing
        return gpus
    indices = [part.strip() for part in setting.split(",")]
    known = list(itertools.takewhile(lambda part: part.isdigit() and int(part) < len(gpus), indices))
    return tuple(gpus[int(part)] for part in known)


def _output(command: list[str]) -> str | None:
    """What a command prints, or None if it cannot be run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    text = _read("/proc/cpuinfo") or ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ram() -> int:
    limit = (_read("/sys/fs/cgroup/memory.max") or "").strip()
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def _disk_free(folder: Path) -> int:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return shutil.disk_usage(existing).free


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _torch_cuda() -> str | None:
    """The CUDA version in torch/version.py, read as text: importing torch takes a second and may fail."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = _read(Path(spec.origin).parent / "version.py") or ""
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [os.path.join(home, "bin", "nvcc")] if home else []
    found = next((p for p in (*places, shutil.which("nvcc")) if p and os.path.exists(p)), None)
    match = re.search(r"release ([\d.]+)", _output([found, "--version"]) or "") if found else None
    return match.group(1) if match else None


def _browser() -> str | None:
    mac = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
    return next(filter(None, map(shutil.which, BROWSERS)), mac if os.path.exists(mac) else None)


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
