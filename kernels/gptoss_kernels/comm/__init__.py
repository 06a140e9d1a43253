"""All-reduce of partial sums over NVLink, fused with the residual add and the next RMSNorm.

    reference.py    what is computed, in plain torch
    kernels.py      one-shot and two-shot kernels over addresses of the peers' memory (Triton)
    own_rows.py     each rank sums its own rows and hands them out in e4m3: for long prompts
    symmetric.py    the memory, the flags and the launch, on torch symmetric memory
    ahead.py        compiled for Hopper without a GPU
"""
from importlib.util import find_spec

from gptoss_kernels.comm.reference import all_reduce_norm, own_ranges

__all__ = ["all_reduce_norm", "own_ranges"]

if find_spec("triton") is not None:
    from gptoss_kernels.comm.own_rows import FusedOwnRows
    from gptoss_kernels.comm.symmetric import FusedAllReduce, SharedMemory, choose_form

    __all__ += ["FusedAllReduce", "FusedOwnRows", "SharedMemory", "choose_form"]
