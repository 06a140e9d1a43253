// Grouped product for decode, sm_90a: few rows per expert, so the weights are the whole cost and each must come past once.
//
//   y[r, n] = bias[e, n] + sum_k x[r, k] * w[e, n, k]        for the (at most 16) rows r of a tile, all of expert e
//
// FORM 0: w is e4m3 in 128x128 blocks. FORM 1: w is MXFP4 as released, 4-bit codes and one power of two per 32 columns,
// turned into e4m3 in registers: the code's sign at bit 7 and its other three bits at bits 4..2 are the e4m3 number of
// the code's value times 2^-6, for all 16 codes, so four weights take two shifts and two masks.
// x is e4m3 with one scale per row and 128 columns. Accumulators are fp32 and start from the bias.
//
// Weights go from memory straight to registers, 16 bytes a thread, several K blocks ahead: nothing else would use them, so
// shared memory would only cost. They are the 64-row operand of wgmma, which may lie in registers; the tokens are the
// 16-column one (mma.sync has no e4m3 on this chip: it would be converted to fp16 first). Which k a byte belongs to does
// not matter to a product as long as both operands agree: a thread's 16 bytes of a row serve two products as they lie,
// and the tokens are laid out in shared memory to match. For MXFP4 all 32 columns of a product must share a scale: four
// neighbouring threads exchange words so that each product is one group.
//
// EPILOGUE 0: y as bf16, row by row; the two warpgroups share the K blocks of 128 weight rows. EPILOGUE 1: clamped SwiGLU
// on interleaved gate/up and e4m3 with a scale per 128; the two warpgroups have 128 weight rows each.
// Compile-time: N, K, FORM, EPILOGUE, ALPHA, LIMIT.
#include "hopper.cuh"

constexpr int TOKENS = 16, THREADS = 256, SPLIT = EPILOGUE == 0 ? 2 : 1, ROWS = EPILOGUE == 0 ? 128 : 256;
constexpr int K_BLOCKS = (K + 127) / 128, N_BLOCKS = (N + 127) / 128;
constexpr int LOADS = FORM == 0 ? 2 : 1;                                // 16-byte loads of a row per K block
constexpr int AHEAD = FORM == 0 ? 2 : 2;                                // K blocks held in registers
constexpr int ROW_BYTES = FORM == 0 ? K : K / 2, CODE_GROUPS = K / 32;
constexpr int PRODUCT_BYTES = TOKENS * 32;                              // tokens of one product: 4 matrices of 8 x 16 bytes

struct Shared {
    union {
        struct {
            alignas(128) uint8 x[K_BLOCKS * 4 * PRODUCT_BYTES];
            float x_scale[K_BLOCKS][TOKENS];
            uint8 w_scale[FORM == 0 ? 16 : ROWS * CODE_GROUPS];
        };
        float y[SPLIT][ROWS][TOKENS + 1];
    };
};
extern "C" __device__ const int decode_gemm_shared_bytes = sizeof(Shared);

DEVICE uint4 load_once(const uint8* from, bool inside) {                // zeros where there is nothing to read
    uint4 v;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(from), "r"((int)inside));
    return v;
}

// d [64 x 16] = or += a [64 x 32] in registers . b [16 x 32]^T in shared memory.
DEVICE void wgmma_first(float (&d)[8], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, "
                 "1;\n}"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

DEVICE void wgmma_add(float (&d)[8], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, "
                 "1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// Descriptor of the tokens of one product: unswizzled, 128 bytes from 8 tokens to the next, 256 from 16 columns to the next.
DEVICE uint64 tokens_descriptor(uint32 address) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)(256 >> 4) << 16 | (uint64)(128 >> 4) << 32;
}

// Lane q of four holds the words of group q; afterwards it holds word q of the four groups.
DEVICE uint4 exchange(uint4 v) {
    int q = threadIdx.x & 3;
    bool odd = q & 1, high = q & 2;
    uint32 got0 = __shfl_xor_sync(~0u, odd ? v.x : v.y, 1), got1 = __shfl_xor_sync(~0u, odd ? v.z : v.w, 1);
    uint32 a0 = odd ? got0 : v.x, a1 = odd ? v.y : got0, b0 = odd ? got1 : v.z, b1 = odd ? v.w : got1;
    got0 = __shfl_xor_sync(~0u, high ? a0 : b0, 2);
    got1 = __shfl_xor_sync(~0u, high ? a1 : b1, 2);
    return high ? make_uint4(got0, got1, b0, b1) : make_uint4(a0, a1, got0, got1);
}

// Eight codes to eight e4m3 numbers (times 2^-6): the low nibbles of the four bytes, and the high ones.
DEVICE uint32 decode_low(uint32 w) { return (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu); }
DEVICE uint32 decode_high(uint32 w) { return (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu); }

DEVICE float power_of_two(uint32 biased) { return __uint_as_float(biased << 23); }

struct Weights { uint4 v[2][2][LOADS]; };                               // [64-row half][row, row + 8][load]

// `row`: this thread's first 16 bytes of its first row; `limit`: bytes of a row from there on. Nothing beyond is read.
DEVICE void load_weights(Weights& w, const uint8* row, int limit, bool both, int kb) {
    const uint8* at = row + kb * (64 * LOADS);
#pragma unroll
    for (int c = 0; c < LOADS; ++c) {
        bool inside = kb * (64 * LOADS) + c * 64 < limit;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            w.v[i / 2][i % 2][c] = load_once(at + (i / 2 * 64 + i % 2 * 8) * ROW_BYTES + c * 64, inside && (i < 2 || both));
    }
}

// [64-row half][fragment]: fragment 4 t + i is row + 8 (i / 2), token 8 t + 2 q + i % 2.
struct Accumulator { float v[2][8]; };

DEVICE void start_from_bias(Accumulator& acc, const float* bias, bool both, bool mine) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float b = mine && (i < 2 || both) ? __ldg(bias + i / 2 * 64 + i % 2 * 8) : 0.0f;
        acc.v[i / 2][i % 2 * 2] = acc.v[i / 2][i % 2 * 2 + 1] = acc.v[i / 2][4 + i % 2 * 2] = acc.v[i / 2][5 + i % 2 * 2] = b;
    }
}

struct TokenScales {                                                    // of this thread's four tokens
    float2 low, high;
    DEVICE TokenScales(const Shared& s, int kb) {
        const float* at = s.x_scale[kb] + 2 * (threadIdx.x & 3);
        low = *(const float2*)at;
        high = *(const float2*)(at + 8);
    }
    DEVICE float operator[](int i) const { return i < 4 ? (i & 1 ? low.y : low.x) : (i & 1 ? high.y : high.x); }
};

// One K block in e4m3: all of its columns share one weight scale and one scale per token.
DEVICE void multiply_blocks(Accumulator& acc, const Weights& w, const Shared& s, uint64 tokens, int kb, float w_scale) {
    float part[2][8];
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int c = 0; c < LOADS; ++c) {
            const uint4 &u = w.v[m][0][c], &l = w.v[m][1][c];
            uint64 b = tokens + ((kb * 4 + c * 2) * PRODUCT_BYTES >> 4);
            if (c == 0) wgmma_first(part[m], u.x, l.x, u.y, l.y, b); else wgmma_add(part[m], u.x, l.x, u.y, l.y, b);
            wgmma_add(part[m], u.z, l.z, u.w, l.w, b + (PRODUCT_BYTES >> 4));
        }
    wgmma_commit();
    TokenScales x(s, kb);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        pin(part[m]);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc.v[m][i] = fmaf(part[m][i], w_scale * x[i], acc.v[m][i]);
    }
}

// One K block of MXFP4: four groups of 32 columns, each its own product and its own scale per weight row.
DEVICE void multiply_codes(Accumulator& acc, const Weights& w, const Shared& s, uint64 tokens, int kb, int row) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        uint4 upper = exchange(w.v[m][0][0]), lower = exchange(w.v[m][1][0]);
        const uint32 u[4] = {upper.x, upper.y, upper.z, upper.w}, l[4] = {lower.x, lower.y, lower.z, lower.w};
        const uint8* scale = s.w_scale + (row + m * 64) * CODE_GROUPS + kb * 4;
        float sum[8] = {};
#pragma unroll
        for (int g = 0; g < 4; g += 2) {                                // two products at a time: registers are scarce
            float part[2][8];
            uint32 a[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                a[j][0] = decode_low(u[g + j]);
                a[j][1] = decode_low(l[g + j]);
                a[j][2] = decode_high(u[g + j]);
                a[j][3] = decode_high(l[g + j]);
            }
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 2; ++j)
                wgmma_first(part[j], a[j][0], a[j][1], a[j][2], a[j][3], tokens + ((kb * 4 + g + j) * PRODUCT_BYTES >> 4));
            wgmma_commit();
            wgmma_wait<0>();
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                pin(part[j]);
                if (kb * 4 + g + j < CODE_GROUPS) {
                    float up = power_of_two(scale[g + j] + 6), low = power_of_two(scale[g + j + 8 * CODE_GROUPS] + 6);
#pragma unroll
                    for (int i = 0; i < 8; ++i) sum[i] = fmaf(part[j][i], (i & 3) < 2 ? up : low, sum[i]);
                }
            }
        }
        TokenScales x(s, kb);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc.v[m][i] = fmaf(sum[i], x[i], acc.v[m][i]);
    }
}

// Rows of x to shared memory, as the products want them; zeros where there is no row or no column.
DEVICE void stage_tokens(Shared& s, const uint8* x, const float* x_scale, long long scale_row, long long scale_group,
                         const int* token_of, int first, int real, bool gather) {
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * K_BLOCKS * 8; i += THREADS) {
        int r = i / (K_BLOCKS * 8), piece = i % (K_BLOCKS * 8), k = piece * 16;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (r < real && k < K) v = *(const uint4*)(x + (long long)(gather ? token_of[first + r] : first + r) * K + k);
        uint8* at = s.x + r / 8 * 128 + r % 8 * 16;                     // + product, + 256 for its second 16 columns
        if (FORM == 0) {                                                // words 2 j + h of lane `piece % 4`: product j, half h
            at += piece / 4 * 2 * PRODUCT_BYTES + piece % 4 * 4;
            *(uint32*)at = v.x;
            *(uint32*)(at + 256) = v.y;
            *(uint32*)(at + PRODUCT_BYTES) = v.z;
            *(uint32*)(at + PRODUCT_BYTES + 256) = v.w;
        } else {                                                        // 8 columns a lane: even ones, then odd ones
            at += piece / 2 * PRODUCT_BYTES + piece % 2 * 8;
            *(uint2*)at = make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
            *(uint2*)(at + 256) = make_uint2(__byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
        }
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < TOKENS * K_BLOCKS; i += THREADS) {
        int r = i % TOKENS, kb = i / TOKENS;
        s.x_scale[kb][r] = r < real ? x_scale[(gather ? token_of[first + r] : first + r) * scale_row + kb * scale_group] : 0.0f;
    }
}

DEVICE float swiglu(float gate, float up) {
    float g = fminf(gate, LIMIT), u = fminf(fmaxf(up, -LIMIT), LIMIT);
    return g * fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * ALPHA * g)) * (u + 1.0f);
}

DEVICE float result(const Shared& s, int row, int token) {              // the sum of its K shares
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < SPLIT; ++k) total += s.y[k][row][token];
    return total;
}

// Each warp finishes a token at a time: ROWS results, or ROWS / 2 after SwiGLU.
DEVICE void finish(const Shared& s, void* out, float* out_scale, int out_scale_stride, int first, int real, int n0) {
    int lane = threadIdx.x & 31;
    for (int t = threadIdx.x / 32; t < real; t += THREADS / 32) {
        long long row = first + t;
#if EPILOGUE == 0
        for (int i = 2 * lane; i < ROWS; i += 64)
            if (n0 + i < N) *(uint32*)((uint16*)out + row * N + n0 + i) = pack_bf16(result(s, i, t), result(s, i + 1, t));
#else
        float h[4], top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int j = 4 * lane + i;
            h[i] = n0 + 2 * j < N ? swiglu(result(s, 2 * j, t), result(s, 2 * j + 1, t)) : 0.0f;
            top = fmaxf(top, fabsf(h[i]));
        }
        for (int d = 16; d; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
        float scale = top > 0.0f ? top * (1.0f / 448.0f) : 1.0f, to = 1.0f / scale;
        int at = n0 / 2 + 4 * lane;
        if (at < N / 2)
            *(uint32*)((uint8*)out + row * (N / 2) + at) =
                (uint32)pack_e4m3(h[0] * to, h[1] * to) | (uint32)pack_e4m3(h[2] * to, h[3] * to) << 16;
        if (lane == 0) out_scale[(long long)(n0 / 256) * out_scale_stride + row] = scale;
#endif
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
decode_gemm(const uint8* x, const float* x_scale, long long scale_row, long long scale_group, const int* token_of,
            int gather, const uint8* w, const void* w_scale, const float* bias, const int* tile_expert,
            const int* tile_rows, void* out, float* out_scale, int out_scale_stride, int n_tiles) {
    extern __shared__ __align__(128) uint8 raw[];
    Shared& s = *(Shared*)raw;
    int tile = blockIdx.x / n_tiles, n0 = blockIdx.x % n_tiles * ROWS, e = tile_expert[tile];
    if (e < 0) return;
    int real = tile_rows[tile], first = tile * TOKENS, lane = threadIdx.x & 31;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0), share = SPLIT == 2 ? group : 0;
    int local = SPLIT == 2 ? 0 : group * 128, row0 = n0 + local;        // this warpgroup's 128 weight rows
    int row = local + threadIdx.x / 32 % 4 * 16 + lane / 4;
    bool active = row0 < N, both = row0 + 64 < N;                       // N is a multiple of 64

    const uint8* from = w + ((long long)e * N + n0 + row) * ROW_BYTES + (lane & 3) * 16;
    int limit = ROW_BYTES - (lane & 3) * 16;
    Weights held[AHEAD];
    if (active)
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) load_weights(held[i], from, limit, both, share + i * SPLIT);
    float block_scale = 0.0f;
    if (FORM == 0 && active && lane < K_BLOCKS)
        block_scale = ((const float*)w_scale)[((long long)e * N_BLOCKS + row0 / 128) * K_BLOCKS + lane];
    stage_tokens(s, x, x_scale, scale_row, scale_group, token_of, first, real, gather);
    if (FORM == 1) {
        const uint16* scales = (const uint16*)((const uint8*)w_scale + ((long long)e * N + n0) * CODE_GROUPS);
#pragma unroll 1
        for (int i = threadIdx.x; i < min(ROWS, N - n0) * CODE_GROUPS / 2; i += THREADS) ((uint16*)s.w_scale)[i] = scales[i];
    }
    async_fence();
    __syncthreads();

    Accumulator acc = {};
    if (active) {
        uint64 tokens = tokens_descriptor(shared_address(s.x));
        start_from_bias(acc, bias + (long long)e * N + n0 + row, both, share == 0);
#pragma unroll 1
        for (int k0 = share; k0 < K_BLOCKS; k0 += AHEAD * SPLIT)
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                int kb = k0 + i * SPLIT;
                if (kb >= K_BLOCKS) break;
                if (FORM == 0)
                    multiply_blocks(acc, held[i], s, tokens, kb, __shfl_sync(~0u, block_scale, kb));
                else
                    multiply_codes(acc, held[i], s, tokens, kb, row);
                load_weights(held[i], from, limit, both, kb + AHEAD * SPLIT);
            }
    }
    __syncthreads();                                                    // the tokens' place is now the results'
    if (active) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 8; ++i)
                s.y[share][row + m * 64 + (i & 2) * 4][i / 4 * 8 + 2 * (lane & 3) + (i & 1)] = acc.v[m][i];
    }
    __syncthreads();
    finish(s, out, out_scale, out_scale_stride, first, real, n0);
}
