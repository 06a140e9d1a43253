"""Mixture of experts: routing, grouped GEMM with the bias in the accumulator, combine, and the whole layer."""
from gptoss_kernels.moe.combine import combine
from gptoss_kernels.moe.layer import LayerWeights
from gptoss_kernels.moe.layout import GroupLayout, group_layout, max_tiles, padding_share
from gptoss_kernels.moe.routing import Routing, place, route

__all__ = ["GroupLayout", "LayerWeights", "Routing", "combine", "group_layout", "max_tiles", "padding_share", "place",
           "route"]
