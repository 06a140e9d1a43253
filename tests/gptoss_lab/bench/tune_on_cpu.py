"""The tuning bench without a GPU: Triton interpreted, the CUDA product replaced by a plain one, "cuda" read as the CPU.

Run with TRITON_INTERPRET=1 in a process of its own. Prints the cases whose launches all gave the right result, and
"refused: NAME" for a product that is wrong on purpose.
"""
import dataclasses
import sys

import torch
from torch.overrides import TorchFunctionMode

from gptoss_kernels.quant.norm_quant import empty_scales
from gptoss_kernels.reference.moe import swiglu
from gptoss_kernels.reference.quant import dequantise_blocks, dequantise_groups, quantise_groups
from gptoss_lab.bench import tune
from gptoss_lab.bench.tune_launches import CASES, launches

_GENERATOR, _CUDA = torch.Generator, torch.Tensor.cuda


class OnCpu(TorchFunctionMode):
    """Every tensor that asks for "cuda" is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        args = tuple("cpu" if isinstance(one, str) and one == "cuda" else one for one in args)
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return args[0] if function is _CUDA else function(*args, **kwargs)


def plain_gemm(a, a_scale, b, b_scale, bias, counts, *, swiglu=False, columns=None, out=None, add=False):
    """`gemm_cuda.grouped_gemm` in plain torch, its arguments checked as it checks them. Unwritten rows are NaN."""
    tune.gemm_cuda.check_operands(a, a_scale, b, b_scale, bias, counts)
    tune.gemm_cuda.check_out(out, a.shape[0], b.shape[1], add, swiglu)
    assert columns in ((256,) if swiglu else (128, 192, 256))
    stream, n, start = out, b.shape[1], 0
    out = torch.full((a.shape[0], n // 2 if swiglu else n), torch.nan)
    for expert, rows in enumerate(counts.tolist()):
        if not rows:
            continue
        at = slice(start, start + rows)
        x = dequantise_groups(a[at], a_scale[at])
        y = x @ dequantise_blocks(b[expert], b_scale[expert]).T + (bias[expert] if BIASED else 0)
        out[at] = activated(y) if swiglu else y
        start += -(-rows // 128) * 128
    if stream is not None:
        assert add
        return stream.add_(out[: len(stream)].bfloat16())
    if not swiglu:
        return out.bfloat16()
    q, scale = quantise_groups(out.nan_to_num())
    columns_first = empty_scales(*out.shape, "cpu")
    return q, columns_first.copy_(scale)


activated, BIASED = swiglu, True


def small(case):
    """The case with so few tokens and experts that the interpreter is done in seconds."""
    tokens = 40 if "attention" in case.kernel else 3 if case.kernel in (*tune.ROWS, "few-token QKV") else 2
    return dataclasses.replace(case, tokens=tokens, experts=min(case.experts, 4))


def main():
    global BIASED
    torch.Generator = lambda device="cpu": _GENERATOR()
    tune.gemm_cuda.grouped_gemm, tune.CHECKED = plain_gemm, 2
    tune.QKV = tune.WIDE = 256
    first = {(case.kernel, case.experts > 0): small(case) for case in reversed(CASES)}
    with OnCpu():
        for (kernel, _), case in first.items():
            runs = tune.runs_of(case, seed=1)
            assert list(runs.calls) == list(launches(case)) and runs.bound_seconds > 0
            print(kernel, flush=True)
        BIASED = False
        try:
            tune.runs_of(first["down product", True], seed=1)
        except RuntimeError as error:
            print("refused:", str(error).split(",")[0].split("/")[0].removeprefix("tune: "), flush=True)


if __name__ == "__main__":
    sys.exit(main())
