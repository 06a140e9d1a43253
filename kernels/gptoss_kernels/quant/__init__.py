"""Number formats on the device: e4m3 in 1x128 groups, fused with RMSNorm or with SwiGLU."""
from gptoss_kernels.quant.norm_quant import Quantised, empty_quantised, empty_scales, norm_quantise
from gptoss_kernels.quant.place_rows import place_rows
from gptoss_kernels.quant.place_scales import place_scales
from gptoss_kernels.quant.swiglu_quant import swiglu_quantise

__all__ = ["Quantised", "empty_quantised", "empty_scales", "norm_quantise", "place_rows", "place_scales",
           "swiglu_quantise"]
