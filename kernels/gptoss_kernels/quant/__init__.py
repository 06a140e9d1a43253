"""Number formats on the device: e4m3 in 1x128 groups, fused with RMSNorm."""
from gptoss_kernels.quant.norm_quant import empty_scales, norm_quantise

__all__ = ["empty_scales", "norm_quantise"]
