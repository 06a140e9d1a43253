// Grouped GEMM for sm_90a: e4m3 activations scaled per row and 128 columns, e4m3 weights scaled per 128x128 block,
// fp32 accumulators that start from the expert's bias.
//
//   acc[m, n] = bias[e, n] + sum_kb sa[kb, m] * sb[e, n / 128, kb] * (A[m, kb] . B[e, n, kb])
//
// Rows of A are sorted by expert; an expert's rows start at a multiple of 128 and `counts[e]` of them are real. With GATHER
// A keeps the order of its tokens, and `token_of` says which of its rows comes where; the scales sa are sorted all the same.
// EPILOGUE 0: acc as bf16, or with ADD added to what is there. EPILOGUE 1: clamped SwiGLU on interleaved gate/up columns and
// e4m3 again, with one scale per row and 128 results: the 256 columns of a tile are exactly one group, so no other CTA is
// needed for the maximum.
//
// Why this shape. A tensor core product of e4m3 keeps only some 14 bits of its sum, so every 128 columns of K its part is
// scaled into a separate fp32 accumulator, by ordinary FMAs. Two warpgroups of 64 rows take turns: while one scales, the
// other multiplies. Accumulators and part must fit in 224 registers a thread: 128x192 per CTA with products of 192 columns
// (96 + 96), which divides 2880 and 5760 evenly, or, where SwiGLU needs a whole scale group, 128x256 with products of 128
// (128 + 64). Longer products are better: what stands between two of a warpgroup is the same for both.
// Two CTAs form a cluster and share what they have in common, which halves its traffic from L2: two row tiles of one
// expert share B; where an expert has an odd tile left, the two take neighbouring column tiles and share A.
// Two threads load, one weights and one rows; rows that are gathered take two warps. One warp looks up what the next tile is and
// stages its bias and weight scales, so that the multiplying warps never wait for global memory. A tile's results leave while
// the first product of the next one runs: parts and accumulators are separate registers.
//
// What is skipped: half row tiles without a real row, column blocks beyond N, and the empty half of the last K block
// (2880 = 22.5 blocks): none of it reaches the tensor core.
//
// Compile-time: N, K, EXPERTS, HAS_BIAS, EPILOGUE; for 1 ALPHA, LIMIT, GATHER; for 0 ADD and TILE_COLUMNS, 128, 192 or 256.
#include "hopper.cuh"

#ifndef ADD
#define ADD 0
#endif
#ifndef GATHER
#define GATHER 0
#endif
#ifndef TILE_COLUMNS
#define TILE_COLUMNS (EPILOGUE == 1 ? 256 : 192)
#endif
constexpr int TILE_M = 128, TILE_N = TILE_COLUMNS, TILE_K = 128;
constexpr int STAGES = TILE_N == 256 ? 4 : 5;
constexpr int PARTS = TILE_N == 256 ? 2 : 1, WIDTH = TILE_N / PARTS, HELD = WIDTH / 2;   // columns, registers of one part
constexpr int K_BLOCKS = (K + 127) / 128, N_BLOCKS = (N + 127) / 128, N_TILES = (N + TILE_N - 1) / TILE_N;
constexpr int LAST_STEPS = (K - (K_BLOCKS - 1) * 128 + 31) / 32;        // products of 32 columns in the last K block
constexpr int FIRST_STEPS = K_BLOCKS == 1 ? LAST_STEPS : 4;             // and in the first
constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int SCALE_BYTES = TILE_M * 4;                                 // of A, per stage
constexpr int WARP_OUT_BYTES = 16 * 128, OUT_BYTES = 8 * WARP_OUT_BYTES;   // staging: 16 rows of 128 bytes per multiplying warp
constexpr int BIASES = TILE_N / 32, SCALES = (K_BLOCKS + 31) / 32, TOKENS = GATHER ? TILE_M / 32 : 0;   // of a tile, per lane

struct Item {
    int expert, row, n_tile, real;                                      // first row, column tile, real rows of this CTA's tile
    int pair, idle;                                                     // pair: B is shared, else A. idle: nothing to compute
};

struct alignas(16) Tile {                                               // what the multiplying warps need to know of a tile
    float bias[TILE_N];
    float2 scale[K_BLOCKS];                                             // of B, for its two column blocks
    Item item;
    int token[GATHER ? TILE_M : 1];                                     // row of A of each row of this CTA's tile, or -1
};

struct Shared {                                                         // after the swizzled stages
    float a_scale[STAGES][TILE_M];
    Tile tile[2];
    float limit;                                                        // LIMIT
    int scale_stride;                                                   // of A's scales, from one group to the next
    const float* scales;                                                // of A
    int items[EXPERTS + 1], tiles[EXPERTS + 1];                         // first work item, first row tile of an expert
    alignas(8) uint64 full[STAGES], empty[STAGES], tile_full[2], tile_empty[2];
};

constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + OUT_BYTES + (int)sizeof(Shared);
static_assert(SHARED_BYTES <= 227 * 1024, "more shared memory than a CTA can have");
extern "C" __device__ const int grouped_gemm_shared_bytes = SHARED_BYTES;

// Work items of an expert with t row tiles: pairs of row tiles for each column tile, and for an odd last row tile the
// column tiles two by two. An item keeps both CTAs of a cluster busy for the whole of K.
DEVICE int items_of(int tiles) { return tiles / 2 * N_TILES + tiles % 2 * ((N_TILES + 1) / 2); }

DEVICE void make_schedule(Shared& s, const int* counts) {               // one warp: prefix sums over the experts
    int lane = thread_index() & 31, items = 0, tiles = 0;
#pragma unroll 1
    for (int e0 = 0; e0 < EXPERTS; e0 += 32) {
        int t = e0 + lane < EXPERTS ? (counts[e0 + lane] + TILE_M - 1) / TILE_M : 0, w = items_of(t);
        int st = t, sw = w;
        for (int d = 1; d < 32; d *= 2) {
            int ut = __shfl_up_sync(~0u, st, d), uw = __shfl_up_sync(~0u, sw, d);
            if (lane >= d) { st += ut; sw += uw; }
        }
        if (e0 + lane < EXPERTS) { s.items[e0 + lane] = items + sw - w; s.tiles[e0 + lane] = tiles + st - t; }
        items += __shfl_sync(~0u, sw, 31);
        tiles += __shfl_sync(~0u, st, 31);
    }
    if (lane == 0) { s.items[EXPERTS] = items; s.tiles[EXPERTS] = tiles; }
}

DEVICE Item find_item(const Shared& s, const int* counts, int index, int rank) {
    int low = 0, high = EXPERTS;                                        // items[low] <= index < items[high]
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (s.items[middle] <= index) low = middle; else high = middle;
    }
    int inside = index - s.items[low], first = s.tiles[low], tiles = s.tiles[low + 1] - first, pairs = tiles / 2;
    Item item;
    int tile;
    item.expert = low;
    item.pair = inside < pairs * N_TILES;
    if (item.pair) {
        tile = 2 * (inside % pairs) + rank;
        item.n_tile = inside / pairs;
    } else {
        tile = tiles - 1;
        item.n_tile = 2 * (inside - pairs * N_TILES) + rank;
    }
    item.row = (first + tile) * TILE_M;
    item.real = min(TILE_M, __ldg(counts + low) - tile * TILE_M);
    item.idle = item.n_tile >= N_TILES;
    return item;
}

template <int SIZE> struct Turn {                                       // whose turn it is in a ring of SIZE
    int index = 0, phase = 0;
    DEVICE void next() { if (++index == SIZE) { index = 0; phase ^= 1; } }
};

// Half a tile of weight rows. For SwiGLU they arrive in another order, by the shape of their tensor map: of 32 rows, row
// 8 q + 2 j + s comes to place 8 j + 2 q + s, so that a thread's accumulators are gate and up of four results side by side.
template <bool SHARED> DEVICE void load_weights(const TensorMap* map, uint32 to, uint32 bar, int k, int row) {
    if (EPILOGUE == 0) {
        if (SHARED) tma_load_multicast(map, to, bar, k, row, 3); else tma_load(map, to, bar, k, row);
    } else {
        if (SHARED) tma_load_5d_multicast(map, to, bar, k, row / 32, 3); else tma_load_5d(map, to, bar, k, row / 32);
    }
}

// One thread: fill(item, kb, stage) for every stage of every tile in turn, when both CTAs have read what it held.
template <class Fill>
DEVICE void fill_stages(Shared& s, const int* counts, int rank, int cluster, int clusters, Fill fill) {
    Turn<STAGES> turn;
    for (int index = cluster; index < s.items[EXPERTS]; index += clusters) {
        Item item = find_item(s, counts, index, rank);
#pragma unroll 1
        for (int kb = 0; kb < K_BLOCKS; ++kb, turn.next()) {
            barrier_wait(shared_address(&s.empty[turn.index]), turn.phase ^ 1);
            fill(item, kb, turn.index);
        }
    }
}

// Weights, and the scales of A. Where these are comes from shared memory: ptxas would read the arguments anew for each stage,
// and an LDC among the copies costs 2 % of the whole product.
DEVICE void produce_weights(const TensorMap* b_map, uint32 data, Shared& s, const int* counts, int rank, int cluster,
                            int clusters) {
    const float* scales = *(const float* volatile*)&s.scales;
    int stride = *(volatile int*)&s.scale_stride;
    fill_stages(s, counts, rank, cluster, clusters, [&](const Item& item, int kb, int stage) {
        uint32 b = data + stage * STAGE_BYTES + A_BYTES, bar = shared_address(&s.full[stage]);
        int k = kb * TILE_K, row = item.expert * N + (item.idle ? 0 : item.n_tile) * TILE_N;
        barrier_expect(bar, B_BYTES + SCALE_BYTES);
        if (item.pair) {                                                // half of the tile for both CTAs
            load_weights<true>(b_map, b + rank * (B_BYTES / 2), bar, k, row + rank * (TILE_N / 2));
        } else {                                                        // own tile
            load_weights<false>(b_map, b, bar, k, row);
            load_weights<false>(b_map, b + B_BYTES / 2, bar, k, row + TILE_N / 2);
        }
        bulk_load(scales + item.row + kb * stride, shared_address(s.a_scale[stage]), bar, SCALE_BYTES);
    });
}

// Rows of A. By a thread of their own: one that starts all copies of a stage makes the product 1 to 2 % slower.
DEVICE void produce_rows(const TensorMap* a_map, uint32 data, Shared& s, const int* counts, int rank, int cluster,
                         int clusters) {
    fill_stages(s, counts, rank, cluster, clusters, [&](const Item& item, int kb, int stage) {
        uint32 a = data + stage * STAGE_BYTES, bar = shared_address(&s.full[stage]);
        int k = kb * TILE_K;
        barrier_expect(bar, A_BYTES);
        if (item.pair) {                                                // own rows
            tma_load(a_map, a, bar, k, item.row);
            tma_load(a_map, a + A_BYTES / 2, bar, k, item.row + 64);
        } else {                                                        // half of them for both CTAs
            tma_load_multicast(a_map, a + rank * (A_BYTES / 2), bar, k, item.row + rank * 64, 3);
        }
    });
}

// Two warps: the rows of A from wherever their tokens lie, 16 bytes a lane, swizzled as the tensor map would. The tensor core
// sees what ordinary copies wrote only behind a fence of the thread that made them: a stage is handed over when it has
// arrived, while the copies into the next one are on their way.
DEVICE void gather(const uint8* a, uint32 data, Shared& s, int cluster, int clusters) {
    int thread = thread_index() & 63, unit = thread & 7, first = thread / 8;
    uint32 inside = first * 128 + (unit ^ first) * 16;                  // of 8 rows, and of the next 8 as well
    bool none = true;                                                   // no stage is on its way
    Turn<STAGES> turn, behind;
    Turn<2> at;
    auto hand_over = [&] {
        async_fence();
        barrier_arrive_here(shared_address(&s.full[behind.index]));
        behind.next();
    };
    for (int index = cluster; index < s.items[EXPERTS]; index += clusters, at.next()) {
        barrier_wait(shared_address(&s.tile_full[at.index]), at.phase);
        const Tile& tile = s.tile[at.index];
        int from[TILE_M / 8];
#pragma unroll
        for (int i = 0; i < TILE_M / 8; ++i) {
            int token = tile.item.idle ? -1 : tile.token[first + 8 * i];
            from[i] = token < 0 ? -1 : token * K + unit * 16;
        }
        barrier_arrive_here(shared_address(&s.tile_empty[at.index]));
#pragma unroll 1
        for (int kb = 0; kb < K_BLOCKS; ++kb, turn.next()) {
            uint32 to = data + turn.index * STAGE_BYTES + inside;
            barrier_wait(shared_address(&s.empty[turn.index]), turn.phase ^ 1);
            if (kb * TILE_K + unit * 16 < K) {
#pragma unroll
                for (int i = 0; i < TILE_M / 8; ++i)
                    if (from[i] >= 0) copy_async(to + i * 1024, a + from[i] + kb * TILE_K);
            }
            copy_async_commit();
            if (!none) { copy_async_wait_all_but<1>(); hand_over(); }
            none = false;
        }
    }
    copy_async_wait_all_but<0>();
    if (!none) hand_over();
}

// One warp, a tile ahead: what the tile is, its bias, the scales of its weights, which rows of A it gathers. All of it is on
// its way before the first of it is waited for: the first tile of a CTA waits for memory once.
DEVICE void describe(const float* sb, const float* bias, const int* token_of, Shared& s, const int* counts, int rank,
                     int cluster, int clusters) {
    int lane = thread_index() & 31, total = s.items[EXPERTS];
    Turn<2> turn;
    for (int index = cluster; index < total; index += clusters, turn.next()) {
        Item item = find_item(s, counts, index, rank);
        Tile& tile = s.tile[turn.index];
        int n0 = item.n_tile * TILE_N, block = n0 / 128;
        const float* start = bias + item.expert * N + n0;
        const float* scale = sb + (long long)(item.expert * N_BLOCKS + block) * K_BLOCKS;
        float from_bias[BIASES], left[SCALES], right[SCALES];
        int token[TOKENS + 1];
#pragma unroll
        for (int i = 0; i < BIASES; ++i)
            from_bias[i] = HAS_BIAS && n0 + lane + 32 * i < N ? __ldg(start + lane + 32 * i) : 0.0f;
#pragma unroll
        for (int i = 0; i < SCALES; ++i) {
            bool real = !item.idle && lane + 32 * i < K_BLOCKS;
            left[i] = real ? __ldg(scale + lane + 32 * i) : 0.0f;
            right[i] = real && block + 1 < N_BLOCKS ? __ldg(scale + K_BLOCKS + lane + 32 * i) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) token[i] = item.idle ? -1 : __ldg(token_of + item.row + lane + 32 * i);
        barrier_wait(shared_address(&s.tile_empty[turn.index]), turn.phase ^ 1);
#pragma unroll
        for (int i = 0; i < BIASES; ++i) tile.bias[lane + 32 * i] = from_bias[i];
#pragma unroll
        for (int i = 0; i < SCALES; ++i)
            if (lane + 32 * i < K_BLOCKS) tile.scale[lane + 32 * i] = make_float2(left[i], right[i]);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) tile.token[lane + 32 * i] = token[i];
        if (lane == 0) tile.item = item;
        barrier_arrive_here(shared_address(&s.tile_full[turn.index]));
    }
}

// Start part = A[64 x 32 STEPS] . B[WIDTH x 32 STEPS]^T.
template <int STEPS> DEVICE void start_product(float (&part)[HELD], uint64 a, uint64 b) {
    wgmma_fence();
    wgmma_first(part, a, b);
#pragma unroll
    for (int s = 1; s < STEPS; ++s) wgmma_add(part, a + 2 * s, b + 2 * s);
    wgmma_commit();
}

DEVICE void finish_product(float (&part)[HELD]) {
    wgmma_wait<0>();
    pin(part);
}

// acc += part * scale for the registers FROM .. TO - 1; upper and lower: the scale of this thread's two rows.
template <int FROM, int TO>
DEVICE void promote(float (&acc)[HELD], const float (&part)[HELD], float upper, float lower) {
#pragma unroll
    for (int i = FROM; i < TO; i += 4) {
        acc[i] = fmaf(part[i], upper, acc[i]);
        acc[i + 1] = fmaf(part[i + 1], upper, acc[i + 1]);
        acc[i + 2] = fmaf(part[i + 2], lower, acc[i + 2]);
        acc[i + 3] = fmaf(part[i + 3], lower, acc[i + 3]);
    }
}

DEVICE void release(Shared& s, int stage, int lane) {                   // this warp has read the stage: tell both CTAs
    if (lane < 2) barrier_arrive(shared_address(&s.empty[stage]), lane);
}

DEVICE void wait_full(const Turn<STAGES>& turn, Shared& s) { barrier_wait(shared_address(&s.full[turn.index]), turn.phase); }

// Start a product of the K block in the stage at `at`, which has arrived: the first, or that of the weights `from` bytes on.
template <int STEPS> DEVICE void start_block(float (&part)[HELD], uint32 at, int half, int from = 0) {
    start_product<STEPS>(part, tile_descriptor(at + half * (A_BYTES / 2)), tile_descriptor(at + A_BYTES + from));
}

// Finish the K block whose (first) product runs. Whatever else there is to do (reading scales, waiting for the next stage)
// is done while a product runs: what stands between two products of a warpgroup is only the scaling of the first.
template <int STEPS, bool LAST>
DEVICE void finish_block(float (&acc)[PARTS][HELD], float (&part)[HELD], Turn<STAGES>& turn, uint32 data, Shared& s,
                         const Tile& tile, int n0, int kb, int half, int row, int lane) {
    int stage = turn.index;
    if (PARTS == 2) __syncwarp();           // else ptxas reads the scales in front of the product's last instruction
    float upper = s.a_scale[stage][row], lower = s.a_scale[stage][row + 8];
    float left = tile.scale[kb].x, right = tile.scale[kb].y;
    turn.next();
    if (PARTS == 1) {                                                   // 192 columns: a block and a half, or a half and one
        if (!LAST) wait_full(turn, s);
        float middle = n0 & 64 ? right : left;
        finish_product(part);
        release(s, stage, lane);
        promote<0, 32>(acc[0], part, upper * left, lower * left);
        promote<32, 64>(acc[0], part, upper * middle, lower * middle);
        promote<64, HELD>(acc[0], part, upper * right, lower * right);
    } else {
        finish_product(part);
        promote<0, HELD>(acc[0], part, upper * left, lower * left);
        if (n0 + WIDTH < N) {
            start_block<STEPS>(part, data + stage * STAGE_BYTES, half, B_BYTES / 2);
            if (!LAST) wait_full(turn, s);
            finish_product(part);
            release(s, stage, lane);
            promote<0, HELD>(acc[PARTS - 1], part, upper * right, lower * right);
        } else {
            release(s, stage, lane);
            if (!LAST) wait_full(turn, s);
        }
    }
}

// A warpgroup without a real row hands on the stages.
DEVICE void skip(Turn<STAGES>& turn, Shared& s, int lane) {
#pragma unroll 1
    for (int kb = 0; kb < K_BLOCKS; ++kb, turn.next()) {
        wait_full(turn, s);
        release(s, turn.index, lane);
    }
}

// The columns from .. to - 1 of a tile start from the bias.
DEVICE void start_accumulators(float (&acc)[PARTS][HELD], const float* bias, int from = 0, int to = TILE_N) {
    int q = thread_index() & 3;
#pragma unroll
    for (int j = from / 8; j < to / 8; ++j) {                           // columns 8 j + 2 q, which for SwiGLU are others' rows
        float2 b = *(const float2*)(bias + (EPILOGUE == 0 ? 8 * j + 2 * q : j / 4 * 32 + 8 * q + j % 4 * 2));
        float* x = acc[8 * j / WIDTH] + 4 * j % HELD;
        x[0] = x[2] = b.x;
        x[1] = x[3] = b.y;
    }
}

// A warp's 16 rows as bf16, 8 rows of 64 columns at a time: to one of its two buffers, swizzled by 128, and off by the copy
// engine. What lies beyond N is cut off there. Padding rows are written too: they are in this expert's tile, and nobody reads
// them. Accumulators that are in a buffer start from the next tile's bias at once, behind its first product.
DEVICE void finish_bf16(float (&acc)[PARTS][HELD], const TensorMap* out_map, uint32 staging, int row, int n0, int lane,
                        const float* next_bias) {
    bool leader = elect();
#pragma unroll
    for (int column = 0; column < TILE_N; column += 64) {
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
            uint32 buffer = staging + lower * 1024, at = buffer + (lane & 7) * 128;
            if (leader) tma_store_wait_read<1>();
            __syncwarp();
#pragma unroll
            for (int c = 0; c < 2; ++c) {                               // 32 columns: four 8x8 matrices; a lane addresses one row
                const float* x = acc[column / WIDTH] + (column % WIDTH / 32 + c) * 16 + 2 * lower;
                store_matrix_x4(at + ((c * 4 + lane / 8) ^ (lane & 7)) * 16, pack_bf16(x[0], x[1]), pack_bf16(x[4], x[5]),
                                pack_bf16(x[8], x[9]), pack_bf16(x[12], x[13]));
            }
            async_fence();
            __syncwarp();
            if (leader) {                                               // the buffers take turns, stored or not
                if (n0 + column < N) (ADD ? tma_add : tma_store)(out_map, buffer, n0 + column, row + 8 * lower);
                tma_store_commit();
            }
        }
        start_accumulators(acc, next_bias, column, column + 64);
    }
}

#if EPILOGUE == 1
// h = g sigmoid(ALPHA g) (u + 1), g clamped from above, u on both sides; sigmoid(x) = (1 + tanh(x / 2)) / 2.
DEVICE float swiglu(float gate, float up, float limit) {
    float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
    float half = 0.5f * g, share = fmaf(half, fast_tanh(ALPHA * half), half);
    return fmaf(share, u, share);
}

// This thread's results of 64: h[0][j] in row `upper`, h[1][j] in row `lower`, column 16 (j / 4) + 4 (lane % 4) + j % 4.
// Columns beyond N are 0: so is their bias, and nothing was added to it.
DEVICE void activate(const float (&acc)[64], float (&h)[2][16], float limit, float& upper, float& lower) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        h[0][j] = swiglu(acc[4 * j], acc[4 * j + 1], limit);
        h[1][j] = swiglu(acc[4 * j + 2], acc[4 * j + 3], limit);
        upper = fmaxf(upper, fabsf(h[0][j]));
        lower = fmaxf(lower, fabsf(h[1][j]));
    }
}

DEVICE float over_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// 64 columns from `column` on, four bytes at a time; rows `row` and `row + 8` are swizzled alike.
DEVICE void stage_e4m3(const float (&h)[2][16], int column, int lane, float upper, float lower, uint32 buffer) {
    int row = lane / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float* x = h[i / 4] + i % 4 * 4;
        float to = i < 4 ? upper : lower;
        uint32 word = (uint32)pack_e4m3(x[0] * to, x[1] * to) | (uint32)pack_e4m3(x[2] * to, x[3] * to) << 16;
        int unit = (column / 16 + i % 4) ^ row;
        store_shared(buffer + (row + i / 4 * 8) * 128 + unit * 16 + lane % 4 * 4, word);
    }
}

// limit_at: LIMIT in shared memory. Read behind a barrier, it keeps this arithmetic behind the start of the next tile's
// product; ptxas puts it between the product's instructions otherwise.
DEVICE void finish_swiglu(const float (&acc0)[64], const float (&acc1)[64], const float* limit_at, const TensorMap* out_map,
                          float* out_scale, int out_scale_stride, uint32 staging, int row, int n_tile, int lane) {
    float h0[2][16], h1[2][16], upper = 0.0f, lower = 0.0f;
    bool leader = elect();
    if (leader) tma_store_wait_read<0>();
    __syncwarp();
    float limit = *(const volatile float*)limit_at;
    activate(acc0, h0, limit, upper, lower);
    activate(acc1, h1, limit, upper, lower);
    upper = over_quad(upper);
    lower = over_quad(lower);
    float scale_upper = upper > 0.0f ? upper * (1.0f / 448.0f) : 1.0f, scale_lower = lower > 0.0f ? lower * (1.0f / 448.0f) : 1.0f;
    float to_upper = 1.0f / scale_upper, to_lower = 1.0f / scale_lower;
    stage_e4m3(h0, 0, lane, to_upper, to_lower, staging);
    stage_e4m3(h1, 64, lane, to_upper, to_lower, staging);
    async_fence();
    __syncwarp();
    if (leader) { tma_store(out_map, staging, n_tile * 128, row); tma_store_commit(); }
    if (lane % 4 == 0) {
        float* at = out_scale + (long long)n_tile * out_scale_stride + row + lane / 4;
        at[0] = scale_upper;
        at[8] = scale_lower;
    }
}

#endif

// Go on to this warpgroup's next tile with a real row; its first stage has then arrived. False: there is none.
DEVICE bool find_tile(Turn<STAGES>& turn, Turn<2>& at, int& index, int clusters, Shared& s, int half, int lane) {
#pragma unroll 1
    for (; index < s.items[EXPERTS]; index += clusters, at.next()) {
        barrier_wait(shared_address(&s.tile_full[at.index]), at.phase);
        const Item& item = s.tile[at.index].item;
        if (!item.idle && item.real > half * 64) {
            wait_full(turn, s);
            return true;
        }
        skip(turn, s, lane);
        barrier_arrive_here(shared_address(&s.tile_empty[at.index]));
    }
    return false;
}

// A warpgroup: 64 rows of every tile. At each turn of the loop the tile's first product runs already; behind the last tile
// one is started as well, on whatever the stage holds, and its result dropped, since under a condition ptxas would wait for
// it at once.
DEVICE void consume(const TensorMap* out_map, float* out_scale, int out_scale_stride, uint32 data,
                    uint32 staging, Shared& s, int half, int cluster, int clusters) {
    int lane = thread_index() & 31, first = thread_index() / 32 * 16, row = first + lane / 4, index = cluster;
    Turn<STAGES> turn;
    Turn<2> at;
    float acc[PARTS][HELD], part[HELD];
    bool more = find_tile(turn, at, index, clusters, s, half, lane);
    start_block<FIRST_STEPS>(part, data + turn.index * STAGE_BYTES, half);
    start_accumulators(acc, s.tile[at.index].bias);
    while (more) {
        const Tile& tile = s.tile[at.index];
        Item item = tile.item;
        int n0 = item.n_tile * TILE_N;
        finish_block<FIRST_STEPS, K_BLOCKS == 1>(acc, part, turn, data, s, tile, n0, 0, half, row, lane);
#pragma unroll 1
        for (int kb = 1; kb < K_BLOCKS - 1; ++kb) {
            start_block<4>(part, data + turn.index * STAGE_BYTES, half);
            finish_block<4, false>(acc, part, turn, data, s, tile, n0, kb, half, row, lane);
        }
        if (K_BLOCKS > 1) {
            start_block<LAST_STEPS>(part, data + turn.index * STAGE_BYTES, half);
            finish_block<LAST_STEPS, true>(acc, part, turn, data, s, tile, n0, K_BLOCKS - 1, half, row, lane);
        }
        barrier_arrive_here(shared_address(&s.tile_empty[at.index]));
        index += clusters;
        at.next();
        more = find_tile(turn, at, index, clusters, s, half, lane);
        start_block<FIRST_STEPS>(part, data + turn.index * STAGE_BYTES, half);
#if EPILOGUE == 0
        finish_bf16(acc, out_map, staging, item.row + first, n0, lane, s.tile[at.index].bias);
#else
        finish_swiglu(acc[0], acc[1], &s.limit, out_map, out_scale, out_scale_stride, staging, item.row + first, item.n_tile, lane);
        start_accumulators(acc, s.tile[at.index].bias);
#endif
    }
    finish_product(part);
    if (elect()) tma_store_wait<0>();
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1)
grouped_gemm(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
             const __grid_constant__ TensorMap out_map, const float* sa, int sa_stride, const float* sb,
             const float* bias, const int* counts, float* out_scale, int out_scale_stride, const uint8* a,
             const int* token_of) {
    DYNAMIC_SHARED(raw);                      // swizzled tiles start at multiples of 1024
    uint32 data = shared_address(raw), staging = data + STAGES * STAGE_BYTES;
    Shared& s = *(Shared*)(raw + STAGES * STAGE_BYTES + OUT_BYTES);
    int rank = cluster_rank(), cluster = blockIdx.x / 2, clusters = gridDim.x / 2, warp = thread_index() / 32;

    if (thread_index() == 32) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&s.full[i]), GATHER ? 65 : 2);
            barrier_init(shared_address(&s.empty[i]), 16);              // eight warps of each CTA of the cluster
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&s.tile_full[i]), 32);
            barrier_init(shared_address(&s.tile_empty[i]), GATHER ? 320 : 256);
        }
        barrier_init_fence();
    }
    if (thread_index() == 64) {
        tma_prefetch_map(&a_map);
        tma_prefetch_map(&b_map);
        s.scales = sa;
        s.scale_stride = sa_stride;
    }
#if EPILOGUE == 1
    if (thread_index() == 96) s.limit = LIMIT;
#endif
    wait_for_previous();                      // launched as overlapping: what is above is done in the tail of that kernel
    let_next_start();
    if (warp == 0) make_schedule(s, counts);
    __syncthreads();
    cluster_sync();

    if (warp >= 8) {
        registers_shrink<56>();
        if (warp == 8 && elect()) produce_weights(&b_map, data, s, counts, rank, cluster, clusters);
        if (warp == 9) describe(sb, bias, token_of, s, counts, rank, cluster, clusters);
#if GATHER
        if (warp >= 10) gather(a, data, s, cluster, clusters);
#else
        if (warp == 10 && elect()) produce_rows(&a_map, data, s, counts, rank, cluster, clusters);
#endif
    } else {
        registers_grow<224>();
        int half = __shfl_sync(~0u, warp / 4, 0);
        consume(&out_map, out_scale, out_scale_stride, data, staging + warp * WARP_OUT_BYTES, s, half, cluster, clusters);
    }
    __syncthreads();
    cluster_sync();                                                     // nobody leaves while the other may still write here
}
