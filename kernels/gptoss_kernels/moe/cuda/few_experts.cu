// The experts of one token, or of each of a few, sm_90a: e4m3 weights read once for each token and expert, in two launches.
//
//   PART 0   h[t k, i] = swiglu(bias[e] + norm(x)[t] . gate_up[e])                         e = k-th choice of token t
//   PART 1   out[t, n] = [residual[t, n] +] sum_k weight[t, k] (bias[e, n] + down[e, n] . h[t k])
//
// Both take the router's logits and choose for themselves: a launch that chooses, and tables of who is where, would take longer
// than the choice, and nothing is placed by expert here. Products are as in `few_linear.cu`: a CTA owns 16
// rows, its eight warps share the columns, and a lane asks for all its weights before it uses one (PART 1: for BATCH of
// them, and for the next as soon as a place is free). Activations are bf16, not e4m3 as where tokens are many: no scale
// group needs 256 columns of a product in one CTA, so the work is cut into as many CTAs as the memory likes.
//
// PART 1 asks for its first weights while PART 0 still runs: the logits were written by the launch before that one.
//
// Compile-time: PART, N, K (2 I and H, or H and I), EXPERTS, TOP, EPS, ALPHA, LIMIT, ASKED (pieces at once), RESIDENT (CTAs of
// a multiprocessor). N a multiple of 16, K of 64.
#include "few.cuh"

constexpr int WARPS = 8, ROWS = 16, CHUNK = 64, CHUNKS = K / CHUNK, K_BLOCKS = (K + 127) / 128;
constexpr int N_BLOCKS = (N + 127) / 128, N_TILES = N / ROWS, HELD = (EXPERTS + 31) / 32;
constexpr int SUMMED = PART == 0 ? 1 : TOP;                             // experts whose products this CTA adds up
constexpr int ALL = SUMMED * CHUNKS, MINE = (ALL + WARPS - 1) / WARPS, BATCH = MINE < ASKED ? MINE : ASKED;
extern "C" __device__ const int few_experts_shared_bytes = PART == 0 ? 6 * K : 2 * TOP * K;

// The order of two numbers is that of their keys.
DEVICE uint32 key_of(uint32 bits) { return bits & 0x80000000u ? ~bits : bits | 0x80000000u; }
DEVICE float number_of(uint32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

struct Choice { int expert[TOP]; float weight[TOP]; };                  // by descending logit, equal ones by ascending expert

// The softmax over the chosen ones alone. By a whole warp.
DEVICE Choice choose(const float* logits) {
    int lane = threadIdx.x & 31;
    uint32 keys[HELD], first = 0;
#pragma unroll
    for (int j = 0; j < HELD; ++j)
        keys[j] = lane + 32 * j < EXPERTS ? key_of(load_once_u32(logits + lane + 32 * j)) : 0;
    Choice chosen;
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < TOP; ++k) {
        uint32 best = 0, expert = EXPERTS - 1;
#pragma unroll
        for (int j = 0; j < HELD; ++j) best = keys[j] > best ? keys[j] : best;
        best = __reduce_max_sync(~0u, best);
#pragma unroll
        for (int j = HELD - 1; j >= 0; --j) expert = keys[j] == best ? lane + 32 * j : expert;
        expert = __reduce_min_sync(~0u, expert);
#pragma unroll
        for (int j = 0; j < HELD; ++j) keys[j] = lane + 32 * j == expert ? 0 : keys[j];
        if (k == 0) first = best;
        chosen.expert[k] = expert;
        chosen.weight[k] = fast_exp2((number_of(best) - number_of(first)) * 1.4426950408889634f);
        total += chosen.weight[k];
    }
#pragma unroll
    for (int k = 0; k < TOP; ++k) chosen.weight[k] *= 1.0f / total;
    return chosen;
}

DEVICE int pick(const int (&of)[SUMMED], int index) {                   // of[index] without an address
    int found = of[0];
#pragma unroll
    for (int i = 1; i < SUMMED; ++i) found = index == i ? of[i] : found;
    return found;
}

// Rows g and g + 8 of this lane's share of a chunk, if its expert is here.
DEVICE void ask(uint4 (&a)[2], const uint8* w, const int (&expert)[SUMMED], int n0, int chunk) {
    int e = pick(expert, chunk / CHUNKS), lane = threadIdx.x & 31;
    if (chunk >= ALL || e < 0) return;
    const uint8* at = w + ((long long)e * N + n0 + lane / 4) * K + chunk % CHUNKS * CHUNK + (lane & 3) * 16;
    a[0] = load_once(at);
    a[1] = load_once(at + 8 * K);
}

struct Sums { float rows[WARPS][ROWS], squares[WARPS], scale[SUMMED * K_BLOCKS]; };

// The products of this warp's chunks, into `sums`. tokens: [SUMMED][K] bf16 in shared memory; gain: [K] there, for PART 0.
DEVICE void multiply_all(uint4 (&a)[BATCH][2], const uint8* w, const int (&expert)[SUMMED], int n0, const uint16* tokens,
                         const float* gain, Sums& sums) {
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, q = lane & 3;
    float upper = 0.0f, lower = 0.0f, squares = 0.0f;
#pragma unroll
    for (int turn = 0; turn < MINE; ++turn) {
        int chunk = warp + turn * WARPS;
        if (chunk < ALL && pick(expert, chunk / CHUNKS) >= 0) {
            Pieces up = weights_of<true>(a[turn % BATCH][0]), down = weights_of<true>(a[turn % BATCH][1]);
            int k = chunk * CHUNK + q * (CHUNK / 4);                    // K is CHUNKS of them: also over several experts
            Pieces token = token_of<CHUNK, PART == 0>(tokens + k, gain + k, g == 0, squares);
            float part[4] = {}, scale = sums.scale[chunk / CHUNKS * K_BLOCKS + chunk % CHUNKS * CHUNK / 128];
            multiply_chunk<CHUNK>(part, up, down, token);
            upper = fmaf(part[0], scale, upper);
            lower = fmaf(part[2], scale, lower);
        }
        if (turn + BATCH < MINE) ask(a[turn % BATCH], w, expert, n0, warp + (turn + BATCH) * WARPS);
    }
    if (q == 0) sums.rows[warp][g] = upper, sums.rows[warp][g + 8] = lower;
    if (PART == 0) {
        squares += __shfl_xor_sync(~0u, squares, 1);
        squares += __shfl_xor_sync(~0u, squares, 2);
        if (lane == 0) sums.squares[warp] = squares;
    }
    __syncthreads();
}

DEVICE float row_sum(const Sums& sums, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < WARPS; ++from) sum += sums.rows[from][row];
    return sum;
}

DEVICE const float* scales_of(const float* scale, int expert, int n0) {
    return scale + ((long long)expert * N_BLOCKS + n0 / 128) * K_BLOCKS;
}

DEVICE void fetch(uint8* to, const void* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += WARPS * 32) copy_async(to + 16 * i, (const uint8*)from + 16 * i);
}

// Of the experts chosen, those that are held here, from `first` on, are numbered from 0; the others and those of padding tokens
// are -1.
DEVICE int held(int expert, int first, int here, bool real) {
    return real && expert >= first && expert < first + here ? expert - first : -1;
}

#if PART == 0

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
few_experts(const float* logits, const int* real, const uint16* x, const float* gain, const uint8* w, const float* scale,
            const float* bias, uint16* h, int first, int here) {
    __shared__ Sums sums;
    DYNAMIC_SHARED(staged);
    int pair = blockIdx.x / N_TILES, token = pair / TOP, n0 = blockIdx.x % N_TILES * ROWS, warp = threadIdx.x / 32;
    fetch(staged + 2 * K, gain, 4 * K);
    fetch(staged, x + (long long)token * K, 2 * K);                     // written before the launch in front of this one
    wait_for_previous();
    let_next_start();
    int expert[1] = {-1};
    Choice chosen = choose(logits + (long long)token * EXPERTS);
#pragma unroll
    for (int k = 0; k < TOP; ++k)
        if (k == pair % TOP) expert[0] = held(chosen.expert[k], first, here, real == 0 || token < *real);
    if (expert[0] < 0) {
        copy_async_wait();
        return;
    }
    uint4 a[BATCH][2];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) ask(a[i], w, expert, n0, warp + i * WARPS);
    if (threadIdx.x < K_BLOCKS) sums.scale[threadIdx.x] = scales_of(scale, expert[0], n0)[threadIdx.x];
    copy_async_wait();
    __syncthreads();
    multiply_all(a, w, expert, n0, (const uint16*)staged, (const float*)(staged + 2 * K), sums);
    int i = threadIdx.x;
    if (i >= ROWS / 2) return;
    float square = 0.0f;
#pragma unroll
    for (int from = 0; from < WARPS; ++from) square += sums.squares[from];
    float inverse = 1.0f / sqrtf(square / K + EPS);
    float2 b = *(const float2*)(bias + (long long)expert[0] * N + n0 + 2 * i);
    float result = swiglu(fmaf(row_sum(sums, 2 * i), inverse, b.x), fmaf(row_sum(sums, 2 * i + 1), inverse, b.y), ALPHA, LIMIT);
    h[((long long)pair * N + n0) / 2 + i] = (uint16)pack_bf16(result, 0.0f);
}

#else

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT)
few_experts(const float* logits, const int* real, const uint16* h, const uint8* w, const float* scale, const float* bias,
            const uint16* residual, uint16* out, int first, int here) {
    __shared__ Sums sums;
    DYNAMIC_SHARED(staged);
    int token = blockIdx.x / N_TILES, n0 = blockIdx.x % N_TILES * ROWS, warp = threadIdx.x / 32;
    Choice chosen = choose(logits + (long long)token * EXPERTS);
    int expert[TOP];
#pragma unroll
    for (int k = 0; k < TOP; ++k) expert[k] = held(chosen.expert[k], first, here, real == 0 || token < *real);
    uint4 a[BATCH][2];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) ask(a[i], w, expert, n0, warp + i * WARPS);
    float base = 0.0f;                                                  // of row threadIdx.x: residual and weighted biases
    long long at = (long long)token * N + n0 + threadIdx.x;
    if (threadIdx.x < ROWS && residual != 0) base = low(load_once_u16(residual + at));
#pragma unroll
    for (int k = 0; k < TOP; ++k) {
        if (expert[k] < 0) continue;
        if (threadIdx.x < ROWS)
            base = fmaf(chosen.weight[k], __uint_as_float(load_once_u32(bias + (long long)expert[k] * N + n0 + threadIdx.x)), base);
        if (threadIdx.x < K_BLOCKS)
            sums.scale[k * K_BLOCKS + threadIdx.x] =
                chosen.weight[k] * __uint_as_float(load_once_u32(scales_of(scale, expert[k], n0) + threadIdx.x));
    }
    wait_for_previous();
    let_next_start();
#pragma unroll
    for (int k = 0; k < TOP; ++k)                                       // rows that nobody wrote must not be multiplied
        if (expert[k] >= 0) fetch(staged + 2 * K * k, h + ((long long)token * TOP + k) * K, 2 * K);
    copy_async_wait();
    __syncthreads();
    multiply_all(a, w, expert, n0, (const uint16*)staged, 0, sums);
    if (threadIdx.x < ROWS) out[at] = (uint16)pack_bf16(base + row_sum(sums, threadIdx.x), 0.0f);
}

#endif
