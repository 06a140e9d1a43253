"""The plain torch form of every kernel: the one oracle that all tests compare with.

Each function is written for reading, runs on any device and in fp32 or fp64, and takes no shortcut that a kernel
would take. Speed is not a goal; the functions in `norm`, `rope` and `moe` are nevertheless what the model runs where
there is no GPU, so they avoid waste that would make a small model slow.

Importing this package registers each of them as the backend "reference" of its operation, the last resort of "auto".
"""
from gptoss_kernels.reference.attention import sink_attention
from gptoss_kernels.reference.experts import moe
from gptoss_kernels.reference.moe import route
from gptoss_kernels.reference.norm import rms_norm
from gptoss_kernels.reference.rope import apply_rope
from gptoss_kernels.registry import register

RANK = 1000

for _operation, _function in {
    "rms_norm": rms_norm,
    "rope": apply_rope,
    "sink_attention": sink_attention,
    "route": route,
    "moe": moe,
}.items():
    register(_operation, "reference", rank=RANK)(_function)
