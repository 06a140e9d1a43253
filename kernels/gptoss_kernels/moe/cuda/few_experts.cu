// The experts of one token, or of each of a few, sm_90a: e4m3 weights read once for each token and expert, in two launches.
//
//   PART 0   h[t k, i] = swiglu(bias[e] + x[t] . gate_up[e])                                e = k-th choice of token t
//   PART 1   out[t, n] = [residual[t, n] +] sum_k weight[t, k] (bias[e, n] + down[e, n] . h[t k])
//
// Both take the router's logits and choose for themselves (few_choice.cuh); nothing is placed by expert here.
//
// Products are mma.m16n8k16 in f16, which holds every e4m3 number; lanes and places as in few.cuh. Scales of 128 columns
// multiply the fp32 sums of a chunk. A lane asks for ASKED chunks of its rows at once and for the next one as soon as a
// place is free; what memory delivers sets the pace, so nothing else may take long:
// PART 0   a CTA is one warp with 16 rows of an expert; x comes quantised, from the launch that made the logits. Neighbouring
//          rows are gate and up of one result, which is f16: no scale group needs 256 columns in one place.
// PART 1   a CTA has eight rows of all chosen experts. Two experts at a time are the 16 rows of a product, and two columns are
//          their tokens h; its warps share the columns of K. The first weights are asked for while PART 0 still runs: the
//          logits were written by the launch before that one.
//
// Compile-time: PART, N, K (2 I and H, or H and I), EXPERTS, TOP, ALPHA, LIMIT, WARPS, ASKED, RESIDENT (CTAs of a multiprocessor). N
// a multiple of 16, K of 64 up to 4096.
#include "few_choice.cuh"

constexpr int CHUNK = 64, CHUNKS = K / CHUNK, K_BLOCKS = (K + 127) / 128, N_BLOCKS = (N + 127) / 128;
static_assert(K_BLOCKS <= 32, "a lane holds one scale");
constexpr int COUPLES = (TOP + 1) / 2, SHARING = PART == 0 ? 1 : WARPS / COUPLES;      // warps of a row
static_assert(PART == 1 || WARPS == 1, "PART 0 has one warp");
constexpr int ROWS = PART == 0 ? 16 : 8, N_TILES = N / ROWS, TURNS = (CHUNKS + SHARING - 1) / SHARING;
static_assert(SHARING > 0, "at most 16 experts of a token");
extern "C" __device__ const int few_experts_shared_bytes = PART == 0 ? K : 2 * TOP * K;

DEVICE Pieces halves_of(uint4 v) {                                      // 16 e4m3 numbers in f16
    Pieces p;
    uint32 in[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        p.w[2 * i] = f16_of_e4m3((uint16)in[i]);
        p.w[2 * i + 1] = f16_of_e4m3((uint16)(in[i] >> 16));
    }
    return p;
}

// A warp's chunks `first`, first + SHARING, ... of two rows a lane. What is asked for lies in `a` until it is used; a row that
// is not here (0) is left out.
DEVICE void ask(uint4 (&a)[2], const uint8* upper, const uint8* lower, int chunk) {
    if (chunk >= CHUNKS) return;
    if (upper != 0) a[0] = load_once_and_more(upper + chunk * CHUNK);
    if (lower != 0) a[1] = load_once_and_more(lower + chunk * CHUNK);
}

DEVICE void begin(uint4 (&a)[ASKED][2], const uint8* upper, const uint8* lower, int first) {
#pragma unroll
    for (int i = 0; i < ASKED; ++i) ask(a[i], upper, lower, first + i * SHARING);
}

// use(chunk, upper 16 bytes, lower 16 bytes), for each chunk.
template <class Use>
DEVICE void go_on(uint4 (&a)[ASKED][2], const uint8* upper, const uint8* lower, int first, Use use) {
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn += ASKED) {
#pragma unroll
        for (int i = 0; i < ASKED; ++i) {
            int chunk = first + (turn + i) * SHARING;
            if (chunk < CHUNKS) use(chunk, a[i][0], a[i][1]);
            ask(a[i], upper, lower, chunk + ASKED * SHARING);
        }
    }
}

DEVICE void fetch(uint8* to, const void* from, int bytes) {             // by all threads of the CTA
    for (int i = threadIdx.x; i < bytes / 16; i += WARPS * 32) copy_async(to + 16 * i, (const uint8*)from + 16 * i);
}

DEVICE const float* scales_of(const float* scale, int expert, int n0) {
    return scale + ((long long)expert * N_BLOCKS + n0 / 128) * K_BLOCKS;
}

#if PART == 0

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
few_experts(const float* logits, const int* real, const uint8* x, const float* x_scale, long long scale_row, long long scale_group,
            const uint8* w, const float* scale, const float* bias, uint16* h, int first, int here) {
    __shared__ float scales[K_BLOCKS];
    DYNAMIC_SHARED(staged);
    int pair = blockIdx.x / N_TILES, token = pair / TOP, n0 = blockIdx.x % N_TILES * ROWS;
    int lane = threadIdx.x, g = lane / 4, q = lane & 3;
    wait_for_previous();
    let_next_start();
    fetch(staged, x + (long long)token * K, K);
    int e = held(pick(choose(logits + (long long)token * EXPERTS).expert, pair % TOP), first, here, real == 0 || token < *real);
    if (e < 0) {
        copy_async_wait();
        return;
    }
    const uint8 *upper = w + ((long long)e * N + n0 + g) * K + q * 16, *lower = upper + 8 * K;
    uint4 a[ASKED][2];
    begin(a, upper, lower, 0);
    const float* biases = bias + (long long)e * N + n0 + g;
    float gate = biases[0], up = biases[8];                             // of rows g and g + 8, later
    if (lane < K_BLOCKS) scales[lane] = scales_of(scale, e, n0)[lane] * x_scale[token * scale_row + lane * scale_group];
    copy_async_wait();
    __syncthreads();
    go_on(a, upper, lower, 0, [&](int chunk, uint4 high, uint4 low) {
        uint4 mine = g == 0 ? *(const uint4*)(staged + chunk * CHUNK + q * 16) : make_uint4(0, 0, 0, 0);
        float part[4] = {}, by = scales[chunk * CHUNK / 128];
        multiply_chunk<CHUNK, true>(part, halves_of(high), halves_of(low), halves_of(mine));
        gate = fmaf(part[0], by, gate);
        up = fmaf(part[2], by, up);
    });
    float other = __shfl_xor_sync(~0u, g & 1 ? gate : up, 4);           // even rows take over the upper half, odd ones the lower
    float result = g & 1 ? swiglu(other, up, ALPHA, LIMIT) : swiglu(gate, other, ALPHA, LIMIT);
    int row = g & 1 ? g + 7 : g;                                        // of the gate
    if (q == 0) h[((long long)pair * N + n0 + row) / 2] = (uint16)pack_f16(result, 0.0f);
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
few_experts(const float* logits, const int* real, const uint16* h, const uint8* w, const float* scale, const float* bias,
            const uint16* residual, uint16* out, int first, int here) {
    __shared__ float scales[TOP][K_BLOCKS], sums[WARPS][ROWS];
    DYNAMIC_SHARED(staged);
    int token = blockIdx.x / N_TILES, n0 = blockIdx.x % N_TILES * ROWS, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    int g = lane / 4, q = lane & 3, one = warp / SHARING * 2, start = warp % SHARING;
    Choice chosen = choose(logits + (long long)token * EXPERTS);
    const uint8* rows[2] = {0, 0};                                      // of the two experts of this warp
#pragma unroll
    for (int k = 0; k < TOP; ++k) {
        int e = chosen.expert[k] = held(chosen.expert[k], first, here, real == 0 || token < *real);
        if (e >= 0 && k / 2 * 2 == one) rows[k & 1] = w + ((long long)e * N + n0 + g) * K + q * 16;
    }
    uint4 a[ASKED][2];
    begin(a, rows[0], rows[1], start);
    float base = 0.0f;                                                  // of row threadIdx.x: residual and weighted biases
    long long at = (long long)token * N + n0 + threadIdx.x;
    if (threadIdx.x < ROWS && residual != 0) base = low(load_once_u16(residual + at));
#pragma unroll
    for (int k = 0; k < TOP; ++k) {
        int e = chosen.expert[k];
        if (e < 0) continue;
        if (threadIdx.x < ROWS)
            base = fmaf(chosen.weight[k], __uint_as_float(load_once_u32(bias + (long long)e * N + n0 + threadIdx.x)), base);
        if (threadIdx.x < K_BLOCKS)
            scales[k][threadIdx.x] = chosen.weight[k] * __uint_as_float(load_once_u32(scales_of(scale, e, n0) + threadIdx.x));
    }
    wait_for_previous();
    let_next_start();
    fetch(staged, h + (long long)token * TOP * K, 2 * TOP * K);         // nobody wrote the rows of experts that are elsewhere
    copy_async_wait();
    __syncthreads();
    float left = 0.0f, right = 0.0f;                                    // columns of the two tokens
    go_on(a, rows[0], rows[1], start, [&](int chunk, uint4 upper, uint4 lower) {
        int mine = one + (g & 1 && one + 1 < TOP);                      // lane g = 0 has the first one's token, 1 the second's
        Pieces token = g < 2 ? pieces_at(staged + 2 * (mine * K + chunk * CHUNK + q * 16)) : Pieces{};
        float part[4] = {};
        multiply_chunk<CHUNK, true>(part, halves_of(upper), halves_of(lower), token);
        if (rows[0] != 0) left = fmaf(part[0], scales[one][chunk * CHUNK / 128], left);
        if (rows[1] != 0) right = fmaf(part[3], scales[one + 1 < TOP ? one + 1 : one][chunk * CHUNK / 128], right);
    });
    if (q == 0) sums[warp][g] = left + right;
    __syncthreads();
    if (threadIdx.x >= ROWS) return;
#pragma unroll
    for (int from = 0; from < WARPS; ++from) base += sums[from][threadIdx.x];
    out[at] = (uint16)pack_bf16(base, 0.0f);
}

#endif
