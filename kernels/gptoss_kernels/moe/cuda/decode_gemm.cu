// Grouped product for decode, sm_90a: few rows per expert, so the weights are the whole cost and each must come past once.
//
//   y[r, n] = bias[e, n] + sum_k x[r, k] * w[e, n, k]        for the (at most 16) rows r of a tile, all of expert e
//
// FORM 0: w is e4m3 in 128x128 blocks. FORM 1: w is MXFP4 as released, 4-bit codes and one power of two per 32 columns,
// turned into e4m3 in registers: the code's sign at bit 7 and its other three bits at bits 4..2 are the e4m3 number of
// the code's value times 2^-6, for all 16 codes, so four weights take two shifts and two masks.
// x is e4m3 with one scale per row and 128 columns. Accumulators are fp32 and start from the bias.
//
// One thread keeps a deep ring of weight stages on the way from memory (TMA), across the borders of work items, and so the
// memory busy while the two multiplying warpgroups stage tokens or finish results. The weights are the 64-row operand of
// wgmma and the tokens the 16-column one: e4m3 weights are read where they lie; MXFP4 words go through registers, which
// that operand may also come from. All 32 columns of a product are one MXFP4 group; which k a byte belongs to does not
// matter to a product as long as both operands agree, so the tokens of a group are laid out evens first, then odds.
//
// The second product of a layer may be launched while the first still runs: then its weights are already on their way when
// the tokens come. That is safe because the tables of the routing were complete before the first product began.
//
// EPILOGUE 0: y as bf16; a work item is 128 weight rows. EPILOGUE 1: clamped SwiGLU on interleaved gate/up and e4m3 with a
// scale per 128; an item is 256 weight rows, one scale group.
// Compile-time: N, K, FORM, EPILOGUE, ALPHA, LIMIT. N and K are multiples of 64.
#include "hopper.cuh"

constexpr int TOKENS = 16, HALVES = EPILOGUE == 0 ? 1 : 2, ROWS = HALVES * 128;      // 64-row halves of a warpgroup
constexpr int K_BLOCKS = (K + 127) / 128, N_BLOCKS = (N + 127) / 128, N_TILES = (N + ROWS - 1) / ROWS;
constexpr int ROW_BYTES = FORM == 0 ? K : K / 2, GROUPS = K / 32;
constexpr int ITEM_STAGES = (ROW_BYTES + 127) / 128, STAGE_BYTES = ROWS * 128;
constexpr int STAGES = 131072 / STAGE_BYTES + (FORM == 0 ? 32768 / STAGE_BYTES : 0);
constexpr int PRODUCT_BYTES = TOKENS * 32;                              // tokens of one product: 4 matrices of 8 x 16 bytes
constexpr int SCALE_BYTES = FORM == 0 ? 16 : ROWS * GROUPS;             // MXFP4 scales of an item

struct Shared {                                                         // after the stages
    union {
        alignas(128) uint8 x[K_BLOCKS * 4 * PRODUCT_BYTES];
        float y[ROWS][TOKENS + 1];
    };
    alignas(16) uint8 w_scale[FORM == 0 ? 1 : 2][SCALE_BYTES];
    float x_scale[K_BLOCKS][TOKENS];
    int live;
    alignas(8) uint64 full[STAGES], empty[STAGES], scale_full[2], scale_empty[2];
};
extern "C" __device__ const int decode_gemm_shared_bytes = STAGES * STAGE_BYTES + sizeof(Shared);

// d [64 x 16] = or += a [64 x 32] . b [16 x 32]^T, a in shared memory or in registers, b in shared memory.
DEVICE void wgmma_first(float (&d)[8], uint64 a, uint64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;\n}"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
                 : "l"(a), "l"(b));
}

DEVICE void wgmma_add(float (&d)[8], uint64 a, uint64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "l"(a), "l"(b));
}

DEVICE void wgmma_first(float (&d)[8], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, "
                 "1;\n}"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// Descriptor of the tokens of one product: unswizzled, 128 bytes from 8 tokens to the next, 256 from 16 columns to the next.
DEVICE uint64 tokens_descriptor(uint32 address) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)(256 >> 4) << 16 | (uint64)(128 >> 4) << 32;
}

// Eight codes to eight e4m3 numbers (times 2^-6): the low nibbles of the four bytes, and the high ones.
DEVICE uint32 decode_low(uint32 w) { return (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu); }
DEVICE uint32 decode_high(uint32 w) { return (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu); }

DEVICE float power_of_two(uint32 biased) { return __uint_as_float(biased << 23); }

template <int SIZE> struct Turn {                                       // whose turn it is in a ring of SIZE
    int index = 0, phase = 0;
    DEVICE void next() { if (++index == SIZE) { index = 0; phase ^= 1; } }
};

// One warp: how many tiles there are. They are the first ones, so counting the owned ones is enough.
DEVICE int count_tiles(const int* tile_expert, int tiles) {
    int mine = 0;
    for (int i = threadIdx.x & 31; i < tiles; i += 32) mine += tile_expert[i] >= 0;
    for (int d = 16; d; d /= 2) mine += __shfl_xor_sync(~0u, mine, d);
    return mine;
}

DEVICE void produce(const TensorMap* map, const uint8* w_scale, const int* tile_expert, uint32 data, Shared& s) {
    Turn<STAGES> turn;
    Turn<2> at;
    for (int item = blockIdx.x; item < s.live * N_TILES; item += gridDim.x) {
        int e = __ldg(tile_expert + item / N_TILES), n0 = item % N_TILES * ROWS, rows = min(ROWS, N - n0);
        if (FORM == 1) {
            uint32 bar = shared_address(&s.scale_full[at.index]);
            barrier_wait(shared_address(&s.scale_empty[at.index]), at.phase ^ 1);
            barrier_expect(bar, rows * GROUPS);
            bulk_load(w_scale + ((long long)e * N + n0) * GROUPS, shared_address(s.w_scale[at.index]), bar, rows * GROUPS);
            at.next();
        }
#pragma unroll 1
        for (int i = 0; i < ITEM_STAGES; ++i, turn.next()) {
            uint32 to = data + turn.index * STAGE_BYTES, bar = shared_address(&s.full[turn.index]);
            barrier_wait(shared_address(&s.empty[turn.index]), turn.phase ^ 1);
            barrier_expect(bar, rows * 128);
            for (int r = 0; r < rows; r += 64) tma_load(map, to + r * 128, bar, i * 128, e * N + n0 + r);
        }
    }
}

// [64-row half][fragment]: fragment 4 t + i is row + 8 (i / 2), token 8 t + 2 q + i % 2.
struct Accumulator { float v[HALVES][8]; };

DEVICE void start_from_bias(Accumulator& acc, const float* bias, int rows) {
#pragma unroll
    for (int m = 0; m < HALVES; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float b = m * 64 < rows ? __ldg(bias + m * 64 + i * 8) : 0.0f;
            acc.v[m][i * 2] = acc.v[m][i * 2 + 1] = acc.v[m][4 + i * 2] = acc.v[m][5 + i * 2] = b;
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

// One stage in e4m3, 128 columns: they share one weight scale and one scale per token.
DEVICE void multiply_blocks(Accumulator& acc, uint32 weights, uint64 tokens, const Shared& s, int kb, float w_scale) {
    float part[HALVES][8];
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        uint64 a = tile_descriptor(weights + m * 64 * 128), b = tokens + (kb * 4 * PRODUCT_BYTES >> 4);
        wgmma_first(part[m], a, b);
#pragma unroll
        for (int i = 1; i < 4; ++i) wgmma_add(part[m], a + 2 * i, b + (i * PRODUCT_BYTES >> 4));
    }
    wgmma_commit();
    TokenScales x(s, kb);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        pin(part[m]);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc.v[m][i] = fmaf(part[m][i], w_scale * x[i], acc.v[m][i]);
    }
}

DEVICE uint32 code_word(uint32 weights, int row, int group) {           // this thread's word of a group, swizzled by 128
    uint32 word, at = weights + row * 128 + ((group ^ (row & 7)) * 16) + (threadIdx.x & 3) * 4;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at));
    return word;
}

// Half a stage of MXFP4, 128 columns in four groups: each is its own product with its own scale per weight row.
DEVICE void multiply_codes(Accumulator& acc, uint32 weights, uint64 tokens, const Shared& s, const uint8* scales, int row,
                           int half, int kb) {
    TokenScales x(s, kb);
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        float part[4][8], sum[8] = {};
        uint32 a[4][4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            uint32 upper = code_word(weights, m * 64 + row, half * 4 + g), lower = code_word(weights, m * 64 + row + 8, half * 4 + g);
            a[g][0] = decode_low(upper);
            a[g][1] = decode_low(lower);
            a[g][2] = decode_high(upper);
            a[g][3] = decode_high(lower);
        }
        wgmma_fence();
#pragma unroll
        for (int g = 0; g < 4; ++g)
            wgmma_first(part[g], a[g][0], a[g][1], a[g][2], a[g][3], tokens + ((kb * 4 + g) * PRODUCT_BYTES >> 4));
        wgmma_commit();
        float up[4], low[4];
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            bool inside = kb * 4 + g < GROUPS;
            up[g] = inside ? power_of_two(scales[m * 64 * GROUPS + kb * 4 + g] + 6) : 0.0f;
            low[g] = inside ? power_of_two(scales[(m * 64 + 8) * GROUPS + kb * 4 + g] + 6) : 0.0f;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            pin(part[g]);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = fmaf(part[g][i], (i & 3) < 2 ? up[g] : low[g], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) acc.v[m][i] = fmaf(sum[i], x[i], acc.v[m][i]);
    }
}

struct Tokens {                                                         // where the rows of x are
    const uint8* x;
    const float* scale;
    long long scale_row, scale_group;
    const int* token_of;                                                // null: the rows are already in their places
};

// The real rows of a tile to shared memory as the products want them. Other rows hold anything: a token's results depend
// on its own row alone. Columns beyond K are zero, as the weights there are.
DEVICE void stage_tokens(Shared& s, const Tokens& t, int first, int real) {
    constexpr int PIECES = K_BLOCKS * 8;
    for (int i = threadIdx.x; i < real * PIECES; i += 256) {
        int r = i / PIECES, piece = i % PIECES;
        uint4 v = make_uint4(0, 0, 0, 0);
        long long row = t.token_of ? t.token_of[first + r] : first + r;
        if (piece * 16 < K) v = *(const uint4*)(t.x + row * K + piece * 16);
        uint8* at = s.x + piece / 2 * PRODUCT_BYTES + r / 8 * 128 + r % 8 * 16;      // + 256: the second 16 columns
        if (FORM == 0) {
            *(uint4*)(at + piece % 2 * 256) = v;
        } else {                                                        // 8 columns a lane: even ones, then odd ones
            at += piece % 2 * 8;
            *(uint2*)at = make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
            *(uint2*)(at + 256) = make_uint2(__byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
        }
    }
    for (int i = threadIdx.x; i < real * K_BLOCKS; i += 256) {
        int r = i / K_BLOCKS, kb = i % K_BLOCKS;
        long long row = t.token_of ? t.token_of[first + r] : first + r;
        s.x_scale[kb][r] = t.scale[row * t.scale_row + kb * t.scale_group];
    }
}

DEVICE float swiglu(float gate, float up) {
    float g = fminf(gate, LIMIT), u = fminf(fmaxf(up, -LIMIT), LIMIT);
    return g * fast_reciprocal(1.0f + fast_exp2(-1.4426950408889634f * ALPHA * g)) * (u + 1.0f);
}

// Each warp finishes a token at a time: ROWS results, or ROWS / 2 after SwiGLU.
DEVICE void finish(const Shared& s, void* out, float* out_scale, int out_scale_stride, int first, int real, int n0) {
    int lane = threadIdx.x & 31;
    for (int t = threadIdx.x / 32; t < real; t += 8) {
        long long row = first + t;
#if EPILOGUE == 0
        for (int i = 2 * lane; i < ROWS; i += 64)
            if (n0 + i < N) *(uint32*)((uint16*)out + row * N + n0 + i) = pack_bf16(s.y[i][t], s.y[i + 1][t]);
#else
        float h[4], top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int j = 4 * lane + i;
            h[i] = n0 + 2 * j < N ? swiglu(s.y[2 * j][t], s.y[2 * j + 1][t]) : 0.0f;
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

DEVICE void release(uint32 bar) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive_here(bar);
}

// Two warpgroups, each with half of an item's weight rows.
DEVICE void consume(const Tokens& tokens, const float* block_scales, const float* bias, const int* tile_expert,
                    const int* tile_rows, void* out, float* out_scale, int out_scale_stride, uint32 data, Shared& s) {
    int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0), local = group * HALVES * 64;
    int row = threadIdx.x / 32 % 4 * 16 + lane / 4;                     // within a 64-row half
    uint64 tokens_at = tokens_descriptor(shared_address(s.x));
    wait_for_previous();                                                // what the tokens come from; weights are on their way
    Turn<STAGES> turn;
    Turn<2> at;
    for (int item = blockIdx.x; item < s.live * N_TILES; item += gridDim.x) {
        int tile = item / N_TILES, n0 = item % N_TILES * ROWS, e = __ldg(tile_expert + tile), real = __ldg(tile_rows + tile);
        int rows = N - n0 - local;                                      // of this warpgroup's; may be none
        float block_scale = 0.0f;
        if (FORM == 0 && rows > 0 && lane < K_BLOCKS)
            block_scale = __ldg(block_scales + ((long long)e * N_BLOCKS + (n0 + local) / 128) * K_BLOCKS + lane);
        Accumulator acc;
        start_from_bias(acc, bias + (long long)e * N + n0 + local + row, rows);
        stage_tokens(s, tokens, tile * TOKENS, real);
        async_fence();
        named_sync(1, 256);
        if (FORM == 1) barrier_wait(shared_address(&s.scale_full[at.index]), at.phase);
        const uint8* scales = s.w_scale[FORM == 0 ? 0 : at.index] + (local + row) * GROUPS;
#pragma unroll 1
        for (int i = 0; i < ITEM_STAGES; ++i, turn.next()) {
            uint32 weights = data + turn.index * STAGE_BYTES + local * 128;
            barrier_wait(shared_address(&s.full[turn.index]), turn.phase);
            if (rows > 0) {
                if (FORM == 0) {
                    multiply_blocks(acc, weights, tokens_at, s, i, __shfl_sync(~0u, block_scale, i));
                } else {
                    multiply_codes(acc, weights, tokens_at, s, scales, row, 0, 2 * i);
                    if (2 * i + 1 < K_BLOCKS) multiply_codes(acc, weights, tokens_at, s, scales, row, 1, 2 * i + 1);
                }
            }
            release(shared_address(&s.empty[turn.index]));
        }
        if (FORM == 1) { release(shared_address(&s.scale_empty[at.index])); at.next(); }
        named_sync(1, 256);                                             // the tokens' place is now the results'
        if (rows > 0) {
#pragma unroll
            for (int m = 0; m < HALVES; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    s.y[local + m * 64 + row + (i & 2) * 4][i / 4 * 8 + 2 * (lane & 3) + (i & 1)] = acc.v[m][i];
        }
        named_sync(1, 256);
        finish(s, out, out_scale, out_scale_stride, tile * TOKENS, real, n0);
        named_sync(1, 256);
    }
}

extern "C" __global__ void __launch_bounds__(288, 1)
decode_gemm(const __grid_constant__ TensorMap map, const uint8* x, const float* x_scale, long long scale_row,
            long long scale_group, const int* token_of, const void* w_scale, const float* bias, const int* tile_expert,
            const int* tile_rows, int tiles, void* out, float* out_scale, int out_scale_stride) {
    DYNAMIC_SHARED(raw);
    Shared& s = *(Shared*)(raw + STAGES * STAGE_BYTES);
    if (EPILOGUE == 1) wait_for_previous();                             // a layer's first product: that is the routing
    if (threadIdx.x >= 256) {
        int live = count_tiles(tile_expert, tiles);
        if (threadIdx.x == 256) {
            s.live = live;
            for (int i = 0; i < STAGES; ++i) {
                barrier_init(shared_address(&s.full[i]), 1);
                barrier_init(shared_address(&s.empty[i]), 8);
            }
            for (int i = 0; i < 2; ++i) {
                barrier_init(shared_address(&s.scale_full[i]), 1);
                barrier_init(shared_address(&s.scale_empty[i]), 8);
            }
            barrier_init_fence();
        }
    }
    let_next_start();
    __syncthreads();
    if (threadIdx.x == 256) produce(&map, (const uint8*)w_scale, tile_expert, shared_address(raw), s);
    if (threadIdx.x < 256)
        consume({x, x_scale, scale_row, scale_group, token_of}, (const float*)w_scale, bias, tile_expert, tile_rows, out,
                out_scale, out_scale_stride, shared_address(raw), s);
}
