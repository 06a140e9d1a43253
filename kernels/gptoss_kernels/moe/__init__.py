"""Mixture of experts: routing, grouped GEMM with the bias in the accumulator, combine, and the whole layer.

The kernels need Triton. Where there is none (macOS, Windows) the arithmetic of layouts and biases is still here:
`layout` and `study`.
"""
from importlib.util import find_spec

from gptoss_kernels.moe.layout import GroupLayout, group_layout, max_tiles, padding_share

__all__ = ["GroupLayout", "group_layout", "max_tiles", "padding_share"]

if find_spec("triton") is not None:
    from gptoss_kernels.moe.combine import NormInto, combine
    from gptoss_kernels.moe.layer import LayerWeights
    from gptoss_kernels.moe.routing import Routing, choose, place, route

    __all__ += ["LayerWeights", "NormInto", "Routing", "choose", "combine", "place", "route"]
