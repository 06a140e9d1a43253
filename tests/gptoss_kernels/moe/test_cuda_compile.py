"""The Hopper kernels compiled for sm_90a without a GPU: gpt-oss's specialisations, no spill, registers in budget."""
import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton

from gptoss_kernels.moe.cuda import driver
from gptoss_kernels.moe.decode_cuda import TUNED, Tuning, decode_defines
from gptoss_kernels.moe.few_cuda import TUNED as FEW_TUNED
from gptoss_kernels.moe.few_cuda import few_defines, few_source
from gptoss_kernels.moe.gemm_cuda import check_gathered, check_out, gemm_defines

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")
# 384 threads a CTA: at most 168 registers each at the start; the multiplying warpgroups then take 224.
GEMM_REGISTERS, DECODE_REGISTERS = 168, 168
SHAPES = [(5760, True, True), (5760, False, True), (2880, False, True), (2880, False, False), (2944, True, True)]


def machine_code(cubin, folder):
    """The lines of a kernel's machine code: labels and instructions."""
    (folder / "kernel.cubin").write_bytes(cubin)
    done = subprocess.run([DISASSEMBLER, "-c", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    return [re.sub(r"/\*.*?\*/", "", line).strip() for line in done.stdout.splitlines()]


def tight_loops(lines, around, most=300):
    """Of a kernel's loops of at most so many instructions, each that is the shortest around an instruction `around`."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.startswith(".L_x_") and line.endswith(":")}
    jumps = [(labels[to[1]], at) for at, line in enumerate(lines) if (to := re.search(r"BRA.*`\((\.L_x_\d+)\)", line))]
    loops = sorted((jump for jump in jumps if 0 < jump[1] - jump[0] <= most), key=lambda loop: loop[1] - loop[0])
    places = [i for i, line in enumerate(lines) if around in line]
    shortest = {next((loop for loop in loops if loop[0] < i < loop[1]), None) for i in places}
    return [lines[begin:end] for begin, end in sorted(filter(None, shortest))]


def check_loops(code, folder):
    """No argument is read where stages are filled or multiplied: one such read in the loop that starts the copies costs
    2 % of the product. And one thread's copies need no loop over the lanes."""
    lines = machine_code(code, folder)
    products, copies = tight_loops(lines, "QGMMA"), tight_loops(lines, "UTMALDG")
    assert len(products) == 1 and copies
    for body in products + copies:
        assert not [line for line in body if re.search(r"\bLDC\b|ELECT", line)]


@needs_nvcc
@pytest.mark.parametrize(("n", "swiglu", "bias", "experts"), [*((*shape, 128) for shape in SHAPES), (*SHAPES[0], 32)])
def test_grouped_gemm(n, swiglu, bias, experts, tmp_path):
    code, used = driver.compile_nvcc("grouped_gemm.cu", dict(gemm_defines(n, 2880, experts, swiglu=swiglu, bias=bias)))
    print("grouped_gemm", n, swiglu, bias, experts, used)
    assert used["spill_stores"] == used["spill_loads"] == 0
    assert used["registers"] <= GEMM_REGISTERS
    check_loops(code, tmp_path)


@needs_nvcc
@pytest.mark.parametrize("experts", [32, 128])
def test_grouped_gemm_that_gathers(experts, tmp_path):
    """16 rows' places a lane in the two warps that gather, out of 56 registers."""
    defines = dict(gemm_defines(5760, 2880, experts, swiglu=True, bias=True, gather=True))
    code, used = driver.compile_nvcc("grouped_gemm.cu", defines)
    print("grouped_gemm that gathers", experts, used)
    assert used["spill_stores"] == used["spill_loads"] == 0 and used["registers"] <= GEMM_REGISTERS
    check_loops(code, tmp_path)


@needs_nvcc
def test_grouped_gemm_that_adds():
    """The output projection: added by the copy engine, so not a register more."""
    defines = [dict(gemm_defines(2880, 4096, 1, swiglu=False, bias=True, add=add)) for add in (False, True)]
    used = [driver.compile_nvcc("grouped_gemm.cu", each)[1] for each in defines]
    assert used[0] == used[1] and used[1]["spill_stores"] == 0


@pytest.mark.parametrize(("wrong", "message"), [
    ({"out": torch.zeros(128, 32)}, "out is torch.float32"), ({"add": True}, "out missing"),
    ({"out": torch.zeros(129, 32, dtype=torch.bfloat16)}, r"at most \[128, 32\]"),
    ({"out": torch.zeros(128, 32, dtype=torch.bfloat16), "swiglu": True}, "SwiGLU"),
])
def test_where_a_product_can_go(wrong, message):
    given = {"out": None, "add": False, "swiglu": False} | wrong
    with pytest.raises(ValueError, match=message):
        check_out(given["out"], 128, 32, given["add"], given["swiglu"])


@pytest.mark.parametrize(("rows", "wrong", "message"), [
    ((4, 128), {"swiglu": False}, "without swiglu"), ((4, 128), {"token_of": torch.zeros(128)}, "torch.float32"),
    ((4, 128), {"token_of": torch.zeros(256, dtype=torch.int32)[::2]}, "contiguous int32"),
    ((2**24, 128), {}, "2\\^31"),
])
def test_what_can_be_gathered(rows, wrong, message):
    a = torch.empty(rows, dtype=torch.float8_e4m3fn, device="meta")
    given = {"token_of": torch.zeros(128, dtype=torch.int32), "swiglu": True}
    assert check_gathered(a[:4], **given) == 128
    with pytest.raises(ValueError, match=message):
        check_gathered(a, **given | wrong)


@needs_nvcc
@pytest.mark.parametrize(("form", "tuning"), [*TUNED.items(), ("mxfp4", Tuning())])
@pytest.mark.parametrize(("n", "swiglu"), [(5760, True), (2880, False)])
def test_decode_gemm(form, tuning, n, swiglu):
    _, used = driver.compile_nvcc("decode_gemm.cu", dict(decode_defines(n, 2880, form, swiglu=swiglu, tuning=tuning)))
    print("decode_gemm", form, tuning, n, swiglu, used)
    assert used["spill_stores"] == used["spill_loads"] == 0
    assert used["registers"] <= DECODE_REGISTERS and tuning.threads * used["registers"] <= 65536


@needs_nvcc
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("form", FEW_TUNED)
@pytest.mark.parametrize("experts", [32, 128])
def test_few_experts(part, form, experts):
    """As many CTAs as are meant to share a multiprocessor find registers there."""
    _, used = driver.compile_nvcc(few_source(form), dict(few_defines(part, form, 2880, 2880, experts, 4)))
    print("few_experts", part, form, experts, used)
    tuned = FEW_TUNED[form][part]
    resident = tuned.resident if form == "fp8" else 1
    assert used["spill_stores"] == used["spill_loads"] == 0
    assert resident * tuned.threads * used["registers"] <= 65536


@needs_nvcc
def test_a_broken_kernel_says_what_is_wrong():
    with pytest.raises(driver.CudaError, match="EXPERTS"):
        driver.compile_nvcc("grouped_gemm.cu", {"N": 2880, "K": 2880, "EPILOGUE": 0, "HAS_BIAS": 1})


@needs_nvcc
def test_machine_code_is_cached_by_what_went_in(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    defines = dict(gemm_defines(2880, 2880, 32, swiglu=False, bias=True))
    code = driver.compile_cubin("grouped_gemm.cu", defines)
    files = list((tmp_path / "gptoss_kernels").iterdir())
    assert [f.read_bytes() for f in files] == [code]
    assert driver.compile_cubin("grouped_gemm.cu", dict(reversed(defines.items()))) == code
    driver.compile_cubin("grouped_gemm.cu", {**defines, "HAS_BIAS": 0})
    assert len(list((tmp_path / "gptoss_kernels").iterdir())) == 2


def test_launch_structures_have_the_drivers_sizes():
    assert ctypes.sizeof(driver._Attribute) == 72 and ctypes.sizeof(driver._Config) == 56
    assert driver._Config.stream.offset == 32 and ctypes.sizeof(driver.TensorMap) == 128


class FakeDriver:
    """Reads a launch's arguments as a kernel (tensor map, int, long long, pointer, null pointer, int) would."""

    def __init__(self):
        self.launches = []

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, parameters, extra = rest
        self.launches.append((function, shape, stream, extra, self.read(parameters)))
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        of = config._obj
        at = of.attributes.contents
        self.launches.append((function, [*of.grid, *of.block, of.shared_bytes], of.stream, extra,
                              self.read(parameters), of.count, at.id, at.value[0]))
        return 0

    def read(self, parameters):
        at = (ctypes.c_void_p * 6).from_address(parameters)
        kinds = (ctypes.c_int, ctypes.c_longlong, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        values = (kind.from_address(address).value for kind, address in zip(kinds, at[1:], strict=True))
        return ctypes.string_at(at[0], 128), *values


def test_a_launch_hands_over_what_was_given(monkeypatch):
    fake, tensor = FakeDriver(), torch.zeros(3)
    described = driver.TensorMap((ctypes.c_uint8 * 128)(*range(128)))
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    kernel, given = driver.Kernel(2**40, 1024, 3), [described, -5, 2**33 + 1, tensor, 0, 2**31 - 1]
    driver.launch(kernel, 132, 384, given)
    driver.launch(kernel, 131, 288, given, overlapping=True)
    read = bytes(range(128)), -5, 2**33 + 1, tensor.data_ptr(), 0, 2**31 - 1
    assert fake.launches == [(2**40, [132, 1, 1, 384, 1, 1, 1024], 73, None, read),
                             (2**40, [131, 1, 1, 288, 1, 1, 1024], 73, None, read, 1, 6, 1)]
