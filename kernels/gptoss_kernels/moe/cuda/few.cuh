// What the kernels for a few tokens share: a lane's weights and tokens, and their products; the experts' activation.
//
// Products are mma.m16n8k16 in bf16 with 16 rows of weights as one operand and eight tokens as the other. Which k an element
// stands for does not matter to a product as long as both operands agree, so a lane's 16 contiguous bytes of a row are
// simply its share of four (e4m3) or two (bf16) products, and the tokens are read in the same places. Lane 4 g + q has rows g
// and g + 8 of the weights and token g; of the results it gets rows g and g + 8 of tokens 2 q and 2 q + 1.
#pragma once
#include "hopper.cuh"

// Two e4m3 bytes that lie in the upper halves of a word's two 16-bit places, as two bf16. Exact: exponent and mantissa moved to
// their places are the number times 2^-120.
DEVICE uint32 widen(uint32 spread) {
    uint32 small = (spread & 0x80008000u) | (spread & 0x7F007F00u) >> 4;
    return multiply_bf16x2(small, 0x7B807B80u);                         // times 2^120
}

struct Pieces { uint32 w[8]; };                                         // a lane's share of a chunk of one row, in bf16

template <bool E4M3_WEIGHTS> DEVICE Pieces weights_of(uint4 v) {
    Pieces p;
    uint32 in[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (E4M3_WEIGHTS) {
            p.w[2 * i] = widen(__byte_perm(in[i], 0, 0x1404));
            p.w[2 * i + 1] = widen(__byte_perm(in[i], 0, 0x3424));
        } else {
            p.w[i] = in[i];
        }
    }
    return p;
}

DEVICE float low(uint32 w) { return __uint_as_float(w << 16); }
DEVICE float high(uint32 w) { return __uint_as_float(w & 0xFFFF0000u); }

// A token's share of a chunk of COLUMNS columns, with GAIN times the gain; adds its squares then.
template <int COLUMNS, bool GAIN> DEVICE Pieces token_of(const uint16* x, const float* gain, bool there, float& squares) {
    Pieces p;
#pragma unroll
    for (int i = 0; i < COLUMNS / 32; ++i) {
        uint4 v = there ? ((const uint4*)x)[i] : make_uint4(0, 0, 0, 0);
        p.w[4 * i] = v.x, p.w[4 * i + 1] = v.y, p.w[4 * i + 2] = v.z, p.w[4 * i + 3] = v.w;
    }
    if (GAIN) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i) {
            float a = low(p.w[i]), b = high(p.w[i]);
            float2 g = ((const float2*)gain)[i];
            squares = fmaf(a, a, fmaf(b, b, squares));
            p.w[i] = pack_bf16(a * g.x, b * g.y);
        }
    }
    return p;
}

// d += the products of a chunk in bf16, or in f16; up and down: rows g and g + 8.
template <int COLUMNS, bool F16 = false>
DEVICE void multiply_chunk(float (&d)[4], const Pieces& up, const Pieces& down, const Pieces& token) {
#pragma unroll
    for (int m = 0; m < COLUMNS / 16; ++m) {
        uint32 a0 = up.w[2 * m], a1 = down.w[2 * m], a2 = up.w[2 * m + 1], a3 = down.w[2 * m + 1];
        if (F16) multiply_f16(d, a0, a1, a2, a3, token.w[2 * m], token.w[2 * m + 1]);
        else multiply(d, a0, a1, a2, a3, token.w[2 * m], token.w[2 * m + 1]);
    }
}

// The clamped SwiGLU of gpt-oss.
DEVICE float swiglu(float gate, float up, float alpha, float limit) {
    float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
    return g * fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * alpha * g)) * (u + 1.0f);
}
