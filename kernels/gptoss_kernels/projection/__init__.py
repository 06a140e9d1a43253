"""The dense products around attention: the norm before them, and their FP8 form with the bias in the accumulator."""
from gptoss_kernels.projection.few import MOST_TOKENS, few_linear_triton
from gptoss_kernels.projection.few_cuda import few_linear_cuda
from gptoss_kernels.projection.linear import RowPlan, fp8_linear_align, row_plan
from gptoss_kernels.projection.norm import norm_residual_triton

__all__ = ["MOST_TOKENS", "RowPlan", "few_linear_cuda", "few_linear_triton", "fp8_linear_align", "norm_residual_triton",
           "row_plan"]
