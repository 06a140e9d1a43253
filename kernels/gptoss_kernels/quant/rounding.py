"""Casts to bf16 and e4m3, round to nearest even, that mean the same on the GPU and in Triton's interpreter.

On the GPU a cast is one instruction and right. The interpreter's cast to bf16 truncates, its cast to e4m3 loses the
carry out of the mantissa (124.3 becomes 64, not 128), and its `tl.dot` multiplies the bits of bf16 numbers. So there
the value is first rounded, in fp32, to a number that the narrow format holds, and products take fp32 operands.
"""
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _round_mantissa(x, DROPPED: tl.constexpr):
    """fp32 with the lowest DROPPED mantissa bits rounded away, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    bits = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    return ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    """fp32 x to DTYPE (fp32 or bf16)."""
    if INTERPRETED and DTYPE.primitive_bitwidth == 16:
        x = _round_mantissa(x, 16)
    return x.to(DTYPE)


@triton.jit
def round_to_e4m3(x):
    """fp32 x, already within +-448, to the nearest number that e4m3 holds, in fp32."""
    fine = (tl.abs(x) + 24576.0) - 24576.0                              # below 2^-6 the steps are all 2^-9
    negative = x.to(tl.int32, bitcast=True) < 0                         # -0 too; a small negative number becomes -0
    fine = tl.where(negative, fine * -1.0, fine)
    return tl.where(tl.abs(x) < 0.015625, fine, _round_mantissa(x, 20))


@triton.jit
def to_e4m3(x):
    """fp32 x, already within +-448, to e4m3."""
    if INTERPRETED:
        x = round_to_e4m3(x)
    return x.to(tl.float8e4nv)


@triton.jit
def to_e4m3_groups(x):
    """x [..., 128] fp32 to e4m3 and one fp32 scale [...] for each group of 128, amax / 448.

    A group of nothing above 1e-30 counts as zeros, with scale 1: so 1 / scale is finite, and no clamp is needed before
    the cast, since what rounds to more than 448 by an ulp is 448 in e4m3.
    """
    amax = tl.max(tl.abs(x), axis=len(x.shape) - 1)
    scale = tl.where(amax > 1e-30, amax / 448.0, 1.0)
    return to_e4m3(x * tl.expand_dims(1.0 / scale, -1)), scale


@triton.jit
def operand(x):
    """x as `tl.dot` wants it here."""
    if INTERPRETED:
        return x.to(tl.float32)
    return x
