"""CUDA kernels compiled for the host: every CUDA thread a stack of its own (`projection/emulated/hopper.cuh`)."""
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from gptoss_kernels.moe.cuda.driver import HERE

HEADER = Path(__file__).parent / "projection" / "emulated" / "hopper.cuh"


@pytest.fixture
def on_host(tmp_path):
    """on_host(source, run, defines, number=0): a library of a .cu file and, in the same unit behind it, of C++ that
    calls it. number: to tell the libraries of a test from each other."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on the PATH")

    def build(source, run, defines, number=0):
        for file in (HERE / source, HERE / "few.cuh", HERE / "few_choice.cuh", HEADER):
            shutil.copy(file, tmp_path)
        (tmp_path / f"run{number}.cpp").write_text(f'#include "{source}"\n{run}')
        flags = [f"-D{name}={value}" for name, value in defines]
        subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags,
                        "-o", f"run{number}.so", f"run{number}.cpp"], cwd=tmp_path, check=True)
        return ctypes.CDLL(str(tmp_path / f"run{number}.so"))

    return build
