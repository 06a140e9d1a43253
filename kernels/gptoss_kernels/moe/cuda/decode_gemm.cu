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
// memory busy while the multiplying warpgroups stage tokens or finish results. The weights are the 64-row operand of
// wgmma and the tokens the 16-column one: e4m3 weights are read where they lie; MXFP4 words go through registers, which
// that operand may also come from. All 32 columns of a product are one MXFP4 group; which k a byte belongs to does not
// matter to a product as long as both operands agree, so the tokens of a group are laid out evens first, then odds.
//
// A CTA's work items lie side by side, so a tile's tokens come to shared memory once or twice a CTA, not with every item.
// A stage of MXFP4 takes a warp 122 instructions, 56 of which unpack. With many more they would set the pace and not memory,
// so nothing is computed there that can be known before.
//
// The second product of a layer may be launched while the first still runs: then its weights are already on their way when
// the tokens come. That is safe because the tables of the routing were complete before the first product began.
//
// WARPGROUPS: that multiply, 2 or 4. Where four have two times 64 rows (MXFP4 alone), two of them take one half of each stage's
// columns and two the other, and the sums meet in shared memory. NARROW: a tile of at most eight tokens is a product of eight
// columns. PREPARED: the map is fetched and the barriers stand before the kernel in front has ended.
//
// EPILOGUE 0: y as bf16; a work item is 128 weight rows. EPILOGUE 1: clamped SwiGLU on interleaved gate/up and e4m3 with a
// scale per 128; an item is 256 weight rows, one scale group.
// Compile-time: N, K, FORM, EPILOGUE, ALPHA, LIMIT, WARPGROUPS, NARROW, PREPARED. N and K are multiples of 64.
#include "few.cuh"

constexpr int PRODUCER = WARPGROUPS == 4 ? 128 : 32;                    // threads; registers move between whole warpgroups
constexpr int TOKENS = 16, ROWS = EPILOGUE == 0 ? 128 : 256, WARPS = 4 * WARPGROUPS, THREADS = 32 * WARPS;  // that multiply
constexpr int SHARES = 64 * WARPGROUPS > ROWS ? 2 : 1, HALVES = ROWS * SHARES / (64 * WARPGROUPS);   // of 64 rows a warpgroup
static_assert(SHARES == 1 || FORM == 1, "a stage of e4m3 is not shared");
constexpr int K_BLOCKS = (K + 127) / 128, N_BLOCKS = (N + 127) / 128, N_TILES = (N + ROWS - 1) / ROWS;
constexpr int ROW_BYTES = FORM == 0 ? K : K / 2, GROUPS = K / 32, LAST_GROUPS = GROUPS % 4 ? GROUPS % 4 : 4;
constexpr int ITEM_STAGES = (ROW_BYTES + 127) / 128, STAGE_BYTES = ROWS * 128;
constexpr int MOST_STAGES = (FORM == 0 ? 163840 : 131072) / STAGE_BYTES;
constexpr int PRODUCT_BYTES = 8 * 32;                                   // eight tokens of one product: 2 matrices of 8 x 16 bytes
constexpr int EIGHT_TOKENS = K_BLOCKS * 4 * PRODUCT_BYTES;              // of all products

using Results = float[SHARES * ROWS][TOKENS + 1];
union Scales {                                                          // an item's, of MXFP4, and when they have done
    alignas(16) uint8 of[FORM == 0 ? 16 : ROWS * GROUPS];               // their work, its results
    Results y;
};

struct Shared {                                                         // after the stages
    alignas(128) uint8 x[TOKENS / 8 * EIGHT_TOKENS];
    alignas(16) float bias[2][ROWS];                                    // of an item and the next
    Scales scales[FORM == 0 ? 1 : 2];
    float x_scale[K_BLOCKS][TOKENS];
    int live, step;                                                     // tiles with rows; from one item of a CTA to the next
    alignas(8) uint64 full[MOST_STAGES], empty[MOST_STAGES], beside_full[2], beside_empty[2];
    DEVICE Scales& scales_of(int at) { return scales[FORM == 0 ? 0 : at]; }
};
constexpr int ROOM = (232448 - (int)sizeof(Shared)) / STAGE_BYTES, STAGES = ROOM < MOST_STAGES ? ROOM : MOST_STAGES;
static_assert(STAGES > 1, "K is too large for the shared memory of a multiprocessor");
constexpr int BLOCK = FORM == 1 && ITEM_STAGES % 4 == 0 && STAGES % 4 == 0 ? 4 : 1;    // stages a constant apart
extern "C" __device__ const int decode_gemm_shared_bytes = STAGES * STAGE_BYTES + sizeof(Shared);

// Eight codes to eight e4m3 numbers (times 2^-6): the low nibbles of the four bytes, and the high ones.
DEVICE uint32 decode_low(uint32 w) { return (w << 4 & 0x80808080u) | (w << 2 & 0x1C1C1C1Cu); }
DEVICE uint32 decode_high(uint32 w) { return (w & 0x80808080u) | (w >> 2 & 0x1C1C1C1Cu); }

// A descriptor so many bytes further: its address is in the lower word, without a carry.
DEVICE uint64 moved(uint64 descriptor, uint32 bytes) {
    return (descriptor & 0xFFFFFFFF00000000ull) | ((uint32)descriptor + (bytes >> 4));
}

DEVICE float power_of_two(uint32 biased) { return __uint_as_float(biased << 23); }

template <int SIZE> struct Turn {                                       // whose turn it is in a ring of SIZE
    int index = 0, phase = 0;
    DEVICE void next() { if (++index == SIZE) { index = 0; phase ^= 1; } }
};

// One warp: how many tiles there are (they are the first ones), and whether an expert has two.
DEVICE void look_at_tiles(Shared& s, const int* tile_expert, int tiles) {
    int lane = threadIdx.x & 31, mine = 0, again = 0;
    for (int i = lane; i < tiles; i += 32) {
        int e = tile_expert[i];
        mine += e >= 0;
        again |= e >= 0 && i > 0 && tile_expert[i - 1] == e;
    }
    for (int d = 16; d; d /= 2) mine += __shfl_xor_sync(~0u, mine, d), again |= __shfl_xor_sync(~0u, again, d);
    if (lane == 0) s.live = mine, s.step = again ? gridDim.x : 1;
}

// A CTA's items, one beside the other: its tokens change with the tile, once or twice. Where an expert has two tiles, all
// CTAs go through the items together instead, and weights that come a second time come from the L2.
struct Items {
    int first, end, step;
    DEVICE explicit Items(const Shared& s) : first(blockIdx.x), end(s.live * N_TILES), step(s.step) {
        if (step > 1) return;
        long long all = end;
        first = (int)(blockIdx.x * all / gridDim.x);
        end = (int)((blockIdx.x + 1) * all / gridDim.x);
    }
};

DEVICE void produce(const TensorMap* map, const uint8* w_scale, const float* bias, const int* tile_expert, uint32 data,
                    Shared& s) {
    constexpr int SCALES = FORM == 0 ? 0 : GROUPS;                      // of a weight row
    Turn<STAGES> turn;
    Turn<2> at;
    Items items(s);
    for (int item = items.first; item < items.end; item += items.step, at.next()) {
        int e = __ldg(tile_expert + item / N_TILES), n0 = item % N_TILES * ROWS, rows = min(ROWS, N - n0);
        int row = e * N + n0;
        uint32 beside = shared_address(&s.beside_full[at.index]);
        barrier_wait(shared_address(&s.beside_empty[at.index]), at.phase ^ 1);
        barrier_expect(beside, rows * (SCALES + 4));
        bulk_load(bias + row, shared_address(s.bias[at.index]), beside, rows * 4);
        if (FORM == 1) bulk_load(w_scale + (long long)row * GROUPS, shared_address(s.scales[at.index].of), beside, rows * GROUPS);
#pragma unroll 1
        for (int i = 0; i < ITEM_STAGES; ++i, turn.next()) {
            uint32 to = data + turn.index * STAGE_BYTES, bar = shared_address(&s.full[turn.index]);
            barrier_wait(shared_address(&s.empty[turn.index]), turn.phase ^ 1);
            barrier_expect(bar, rows * 128);
            for (int r = 0; r < rows; r += 64) tma_load(map, to + r * 128, bar, i * 128, row + r);
        }
    }
}

// [64-row half][fragment]: fragment 4 t + i is row + 8 (i / 2), token 8 t + 2 q + i % 2.
template <int TILES> struct Accumulator { float v[HALVES][4 * TILES]; };

// bias: of this thread's first row. given: whether this warpgroup is the one that adds it.
template <int TILES> DEVICE void start_from_bias(Accumulator<TILES>& acc, const float* bias, bool given) {
#pragma unroll
    for (int m = 0; m < HALVES; ++m)
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) acc.v[m][i] = given ? bias[m * 64 + (i & 2) * 4] : 0.0f;
}

template <int TILES> struct TokenScales {                               // of this thread's two or four tokens
    float2 of[TILES];
    DEVICE TokenScales(const Shared& s, int kb) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) of[t] = *(const float2*)(s.x_scale[kb] + 8 * t + 2 * (threadIdx.x & 3));
    }
    DEVICE float operator[](int i) const { return i & 1 ? of[i / 4].y : of[i / 4].x; }
};

// One stage in e4m3, 128 columns: they share one weight scale and one scale per token.
template <int TILES>
DEVICE void multiply_blocks(Accumulator<TILES>& acc, uint32 weights, uint64 tokens, const Shared& s, int kb, float w_scale) {
    float part[HALVES][4 * TILES];
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        uint64 a = tile_descriptor(weights + m * 64 * 128), b = tokens + (kb * 4 * PRODUCT_BYTES >> 4);
        wgmma_first(part[m], a, b);
#pragma unroll
        for (int i = 1; i < 4; ++i) wgmma_add(part[m], a + 2 * i, b + (i * PRODUCT_BYTES >> 4));
    }
    wgmma_commit();
    TokenScales<TILES> x(s, kb);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        pin(part[m]);
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) acc.v[m][i] = fmaf(part[m][i], w_scale * x[i], acc.v[m][i]);
    }
}

// Half a stage of MXFP4, 128 columns in four groups (fewer at the end of K): each is its own product with its own scale per
// weight row. word_at: this thread's word of each group, from where the stage is. scales: of its row and the first group.
template <int TILES, int COUNT>
DEVICE void multiply_codes(Accumulator<TILES>& acc, const uint32 (&word_at)[4], int half, uint32 stage, uint64 b, const Shared& s,
                           uint32 scales, int kb) {
    constexpr int TOGETHER = TILES == 1 ? COUNT : 2;                    // groups whose products are in registers at a time
    TokenScales<TILES> x(s, kb);
#pragma unroll
    for (int m = 0; m < HALVES; ++m) {
        float sum[4 * TILES] = {};
#pragma unroll
        for (int first = 0; first < COUNT; first += TOGETHER) {
            float part[TOGETHER][4 * TILES], up[TOGETHER], low[TOGETHER];
            uint32 a[TOGETHER][4];
#pragma unroll
            for (int g = 0; g < TOGETHER; ++g) {
                uint32 at = stage + (word_at[first + g] ^ half * 64) + m * 64 * 128;
                uint32 upper = load_shared(at), lower = load_shared(at + 8 * 128);
                a[g][0] = decode_low(upper);
                a[g][1] = decode_low(lower);
                a[g][2] = decode_high(upper);
                a[g][3] = decode_high(lower);
            }
            wgmma_fence();
#pragma unroll
            for (int g = 0; g < TOGETHER; ++g)
                wgmma_first(part[g], a[g][0], a[g][1], a[g][2], a[g][3], moved(b, (first + g) * PRODUCT_BYTES));
            wgmma_commit();
#pragma unroll
            for (int g = 0; g < TOGETHER; ++g) {
                uint32 at = scales + m * 64 * GROUPS + first + g;
                up[g] = power_of_two(load_shared_byte(at) + 6);
                low[g] = power_of_two(load_shared_byte(at + 8 * GROUPS) + 6);
            }
            wgmma_wait<0>();
#pragma unroll
            for (int g = 0; g < TOGETHER; ++g) {
                pin(part[g]);
#pragma unroll
                for (int i = 0; i < 4 * TILES; ++i) sum[i] = fmaf(part[g][i], (i & 3) < 2 ? up[g] : low[g], sum[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) acc.v[m][i] = fmaf(sum[i], x[i], acc.v[m][i]);
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
    for (int i = threadIdx.x; i < real * PIECES; i += THREADS) {
        int r = i / PIECES, piece = i % PIECES;
        uint4 v = make_uint4(0, 0, 0, 0);
        long long row = t.token_of ? t.token_of[first + r] : first + r;
        if (piece * 16 < K) v = *(const uint4*)(t.x + row * K + piece * 16);
        uint8* at = s.x + r / 8 * EIGHT_TOKENS + piece / 2 * PRODUCT_BYTES + r % 8 * 16;    // + 128: the second 16 columns
        if (FORM == 0) {
            *(uint4*)(at + piece % 2 * 128) = v;
        } else {                                                        // 8 columns a lane: even ones, then odd ones
            at += piece % 2 * 8;
            *(uint2*)at = make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
            *(uint2*)(at + 128) = make_uint2(__byte_perm(v.x, v.y, 0x7531), __byte_perm(v.z, v.w, 0x7531));
        }
    }
    for (int i = threadIdx.x; i < real * K_BLOCKS; i += THREADS) {
        int r = i / K_BLOCKS, kb = i % K_BLOCKS;
        long long row = t.token_of ? t.token_of[first + r] : first + r;
        s.x_scale[kb][r] = t.scale[row * t.scale_row + kb * t.scale_group];
    }
}

DEVICE float result(const Results& y, int row, int token) {
    return SHARES == 1 ? y[row][token] : y[row][token] + y[ROWS + row][token];
}

// Each warp finishes a token at a time: ROWS results, or ROWS / 2 after SwiGLU.
DEVICE void finish(const Results& y, void* out, float* out_scale, int out_scale_stride, int first, int real, int n0) {
    int lane = threadIdx.x & 31;
    for (int t = threadIdx.x / 32; t < real; t += WARPS) {
        long long row = first + t;
#if EPILOGUE == 0
        for (int i = 2 * lane; i < ROWS; i += 64)
            if (n0 + i < N) *(uint32*)((uint16*)out + row * N + n0 + i) = pack_bf16(result(y, i, t), result(y, i + 1, t));
#else
        float h[4], top = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int j = 4 * lane + i;
            h[i] = n0 + 2 * j < N ? swiglu(result(y, 2 * j, t), result(y, 2 * j + 1, t), ALPHA, LIMIT) : 0.0f;
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

// The same number. What ptxas can compute it computes anew for every stage; this it has to keep.
DEVICE uint32 kept(uint32 v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }

struct Place {                                                          // of a warpgroup and a thread in every item
    int local, share, row;                                              // first weight row; which part of a stage; of 64 rows
    uint32 word_at[4];                                                  // its words of half a stage of MXFP4, by group
    DEVICE Place() {
        int lane = threadIdx.x & 31, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
        local = group % (WARPGROUPS / SHARES) * HALVES * 64;
        share = SHARES == 1 ? 0 : group / (WARPGROUPS / SHARES);
        row = threadIdx.x / 32 % 4 * 16 + lane / 4;
        if (FORM == 1)
#pragma unroll
            for (int g = 0; g < 4; ++g)
                word_at[g] = kept((local + row) * 128 + lane % 4 * 4 + ((share * 4 + g) ^ row % 8) * 16);
    }
};

// The products of an item, and their sums to shared memory; TILES of eight tokens. rows: of the weights from this warpgroup's
// first one on, may be none. block_scale: lane i has that of e4m3's K block i.
template <int TILES>
DEVICE void multiply_item(int rows, float block_scale, const Place& place, uint32 data, Turn<STAGES / BLOCK>& turn, int at,
                          Shared& s) {
    int lane = threadIdx.x & 31;
    uint64 tokens_at = moved(rows_descriptor(shared_address(s.x), EIGHT_TOKENS), place.share * 4 * PRODUCT_BYTES);
    uint32 scales = shared_address(s.scales_of(at).of) + (place.local + place.row) * GROUPS + place.share * 4;
    if (FORM == 1) scales = kept(scales);
    Accumulator<TILES> acc;
    start_from_bias(acc, s.bias[at] + place.local + place.row, rows > 0 && place.share == 0);
#pragma unroll 1
    for (int block = 0; block < ITEM_STAGES; block += BLOCK, turn.next()) {
        uint32 ring = data + turn.index * BLOCK * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) {
            int i = block + j;
            barrier_wait(shared_address(&s.full[turn.index * BLOCK + j]), turn.phase);
            if (rows > 0) {
                if (FORM == 0)
                    multiply_blocks(acc, ring + place.local * 128, tokens_at, s, i, __shfl_sync(~0u, block_scale, i));
#pragma unroll
                for (int half = 0; half < 2 * FORM; half += SHARES) {
                    int kb = 2 * i + half + place.share;
                    uint32 scale = scales + 8 * j + 4 * half;
                    uint64 b = moved(tokens_at, (2 * j + half) * 4 * PRODUCT_BYTES);
                    if (j < BLOCK - 1 || kb < K_BLOCKS - 1)
                        multiply_codes<TILES, 4>(acc, place.word_at, half, ring + j * STAGE_BYTES, b, s, scale, kb);
                    else if (kb < K_BLOCKS)
                        multiply_codes<TILES, LAST_GROUPS>(acc, place.word_at, half, ring + j * STAGE_BYTES, b, s, scale, kb);
                }
            }
            release(shared_address(&s.empty[turn.index * BLOCK + j]));
        }
        if (FORM == 1) scales += 8 * BLOCK, tokens_at = moved(tokens_at, BLOCK * 8 * PRODUCT_BYTES);
    }
    named_sync(1, THREADS);                                             // scales, x and the last item's results have been read
    if (rows > 0)
#pragma unroll
        for (int m = 0; m < HALVES; ++m)
#pragma unroll
            for (int i = 0; i < 4 * TILES; ++i)
                s.scales_of(at).y[place.share * ROWS + place.local + m * 64 + place.row + (i & 2) * 4]
                                 [i / 4 * 8 + 2 * (lane & 3) + (i & 1)] = acc.v[m][i];
    named_sync(1, THREADS);
}

// The multiplying warpgroups, each with its part of an item's weight rows.
DEVICE void consume(const Tokens& tokens, const float* block_scales, const int* tile_expert, const int* tile_rows, void* out,
                    float* out_scale, int out_scale_stride, uint32 data, Shared& s) {
    Place place;
    Turn<STAGES / BLOCK> turn;
    Turn<2> at;
    Items items(s);
    int lane = threadIdx.x & 31, staged = -1;                           // the tile whose tokens are there
    wait_for_previous();                                                // what the tokens come from; weights are on their way
    for (int item = items.first; item < items.end; item += items.step, at.next()) {
        int tile = item / N_TILES, n0 = item % N_TILES * ROWS, real = __ldg(tile_rows + tile), rows = N - n0 - place.local;
        float block_scale = 0.0f;
        if (FORM == 0 && rows > 0 && lane < K_BLOCKS) {
            long long block = (long long)__ldg(tile_expert + tile) * N_BLOCKS + (n0 + place.local) / 128;
            block_scale = __ldg(block_scales + block * K_BLOCKS + lane);
        }
        if (tile != staged) {
            stage_tokens(s, tokens, tile * TOKENS, real);
            async_fence();
            named_sync(1, THREADS);
            staged = tile;
        }
        barrier_wait(shared_address(&s.beside_full[at.index]), at.phase);
        if (NARROW && real <= 8) multiply_item<1>(rows, block_scale, place, data, turn, at.index, s);
        else multiply_item<2>(rows, block_scale, place, data, turn, at.index, s);
        finish(s.scales_of(at.index).y, out, out_scale, out_scale_stride, tile * TOKENS, real, n0);
        if (FORM == 1) async_fence();                                   // results were written where the next scales come
        release(shared_address(&s.beside_empty[at.index]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + PRODUCER, 1)
decode_gemm(const __grid_constant__ TensorMap map, const uint8* x, const float* x_scale, long long scale_row,
            long long scale_group, const int* token_of, const void* w_scale, const float* bias, const int* tile_expert,
            const int* tile_rows, int tiles, void* out, float* out_scale, int out_scale_stride) {
    DYNAMIC_SHARED(raw);
    Shared& s = *(Shared*)(raw + STAGES * STAGE_BYTES);
    if (EPILOGUE == 1 && !PREPARED) wait_for_previous();                // a layer's first product: that is the routing
    if (threadIdx.x == THREADS) {
        if (PREPARED) tma_prefetch_map(&map);
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), WARPS);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.beside_full[i]), 1);
            barrier_init(shared_address(&s.beside_empty[i]), WARPS);
        }
        barrier_init_fence();
    }
    if (EPILOGUE == 1 && PREPARED) wait_for_previous();
    if (threadIdx.x >= THREADS && threadIdx.x < THREADS + 32) look_at_tiles(s, tile_expert, tiles);
    let_next_start();
    __syncthreads();
    auto load = [&] {
        if (threadIdx.x / 32 == THREADS / 32 && elect())
            produce(&map, (const uint8*)w_scale, bias, tile_expert, shared_address(raw), s);
    };
    auto multiply = [&] {
        consume({x, x_scale, scale_row, scale_group, token_of}, (const float*)w_scale, tile_expert, tile_rows, out, out_scale,
                out_scale_stride, shared_address(raw), s);
    };
    if (WARPGROUPS == 2) {                                              // two branches: descriptors stay in uniform registers
        load();
        if (threadIdx.x < THREADS) multiply();
    } else if (threadIdx.x >= THREADS) {
        registers_shrink<64>();
        load();
    } else {
        registers_grow<104>();
        multiply();
    }
}
