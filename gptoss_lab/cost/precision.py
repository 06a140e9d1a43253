"""In which format each group of weights lies in memory, and on which tensor core it is multiplied.

Three formats of a weight matrix stored [out, in]: bf16 at 2 bytes; fp8 at 1 byte and one fp32 scale per 128 x 128
block; mxfp4 at half a byte and one scale byte per 32 values along `in`. The format fixes the bytes. It does not quite
fix the arithmetic: Hopper has no FP4 tensor core, so packed MXFP4 is unpacked inside the kernel, to bf16 in today's
kernels, to fp8 in a kernel that also quantises the activations. `mxfp4_unit` says which.

Norms, biases, sinks, router, embedding and head stay bf16, as released.
"""
from __future__ import annotations

from dataclasses import dataclass

from gptoss_lab.cost.errors import CostError

WEIGHT_FORMATS = ("mxfp4", "fp8", "bf16")
FP8_BLOCK = 128
MXFP4_GROUP = 32
BF16_BYTES = 2
_KV_BYTES = {"bf16": 2, "fp8": 1}


def matrix_bytes(weight_format: str, out_features: int, in_features: int) -> int:
    """Bytes of one weight matrix [out_features, in_features] with its scales, in 'mxfp4', 'fp8' or 'bf16'."""
    if weight_format == "bf16":
        return BF16_BYTES * out_features * in_features
    if weight_format == "fp8":
        blocks = -(-out_features // FP8_BLOCK) * -(-in_features // FP8_BLOCK)
        return out_features * in_features + 4 * blocks
    if weight_format == "mxfp4":
        groups = -(-in_features // MXFP4_GROUP)
        return out_features * groups * (MXFP4_GROUP // 2 + 1)
    raise CostError(f"weight format is {weight_format!r}; one of {', '.join(WEIGHT_FORMATS)} is expected")


def kv_value_bytes(kv: str) -> int:
    """Bytes of one stored key or value element; kv is 'bf16' or 'fp8' (whose one scale per head is not counted)."""
    if kv not in _KV_BYTES:
        raise CostError(f"KV format is {kv!r}; one of {', '.join(_KV_BYTES)} is expected")
    return _KV_BYTES[kv]


@dataclass(frozen=True)
class Precision:
    """experts: format of the expert weights. dense: of the QKV and output projections ('fp8' or 'bf16'). kv: of the
    cache ('bf16' or 'fp8'). mxfp4_unit: tensor core that multiplies unpacked MXFP4 ('bf16' or 'fp8')."""

    experts: str = "fp8"
    dense: str = "bf16"
    kv: str = "bf16"
    mxfp4_unit: str = "bf16"

    def __post_init__(self) -> None:
        allowed = {"experts": WEIGHT_FORMATS, "dense": ("fp8", "bf16"), "kv": tuple(_KV_BYTES),
                   "mxfp4_unit": ("bf16", "fp8")}
        for name, choices in allowed.items():
            if getattr(self, name) not in choices:
                raise CostError(f"{name} is {getattr(self, name)!r}; one of {', '.join(choices)} is expected")

    @property
    def expert_unit(self) -> str:
        """Tensor core of the expert products: 'bf16' or 'fp8'."""
        return self.mxfp4_unit if self.experts == "mxfp4" else self.experts


FP8_EXPERTS = Precision()                               # experts in FP8, everything else as released
RELEASED = Precision(experts="mxfp4")                   # the checkpoint as it is, unpacked inside the kernel
SERVED = Precision(experts="fp8", dense="fp8")          # experts and projections in FP8
