// The experts of one token, or of each of a few, sm_90a: MXFP4 weights as released, read once for each token and expert, in two
// launches.
//
//   PART 0   h[t k, i] = swiglu(bias[e] + x[t] . gate_up[e])                                e = k-th choice of token t
//   PART 1   out[t, n] = [residual[t, n] +] sum_k weight[t, k] (bias[e, n] + down[e, n] . h[t k])
//
// Both take the router's logits and choose for themselves (few_choice.cuh); nothing is placed by expert here. x comes quantised,
// from the launch that made the logits; h is f16.
//
// A tile is 16 rows: in PART 0 of one expert, in PART 1 eight of each chosen expert, two experts in a product, so that a CTA has
// the whole sum of its results. A CTA has one warp that loads and TEAMS teams of MEMBERS warps that multiply; it goes through
// every `ctas`-th tile of its token, and its teams take them in turn. The rows of a product come by the copy engine, whole and as
// they lie, into the next of STAGES places. PART 1 begins to load as soon as its CTA has room: the logits were written by the
// launch before PART 0. A team shares the columns of a product.
//
// Products are mma.m16n8k16 in f16; lanes and places as in few.cuh. A chunk is 128 columns, and a lane's 16 bytes of a row are one
// group of 32 codes with a power of two of its own, so the four lanes of a row must not be summed by the product: of the eight
// columns of the other operand a token takes four, with the columns of one group in each and zeros elsewhere. A code's bits,
// moved, are an f16 number, 2^14 times too small. Of the eight codes in a word the first and the fifth share a register, and so
// on: x and h stand in that order.
//
// Compile-time: PART, N, K (2 I and H, or H and I), EXPERTS, TOP, ALPHA, LIMIT, TEAMS, MEMBERS, STAGES. N a multiple of 16, K of 64
// up to 4096.
#include "few_choice.cuh"

constexpr int CHUNKS = (K + 127) / 128, ROW_BYTES = K / 2, GROUPS = K / 32;
constexpr int AT_ONCE = PART == 0 ? 1 : 2, TAKEN = PART == 0 ? 1 : TOP; // experts of a product, and of a tile
constexpr int PRODUCTS = (TAKEN + AT_ONCE - 1) / AT_ONCE, ROWS = 16 / AT_ONCE;      // ROWS: of an expert
constexpr int N_TILES = N / ROWS, TILES = PART == 0 ? TOP * N_TILES : N_TILES;
constexpr int TEAM = MEMBERS * 32, THREADS = TEAMS * TEAM + 32;
static_assert(STAGES % (TEAMS * PRODUCTS) == 0, "a place is one team's: who waits for a barrier must see all of its phases");

// In shared memory, in bytes: the places of a product's rows and their powers of two; x or the h of all experts; 64 zeros.
constexpr int POWERS_AT = 16 * ROW_BYTES, PLACE = (POWERS_AT + 16 * GROUPS + 127) / 128 * 128;
constexpr int TOKENS_AT = STAGES * PLACE, ZEROS_AT = TOKENS_AT + TAKEN * K * 2;
extern "C" __device__ const int few_packed_shared_bytes = ZEROS_AT + 64;

constexpr float CODES = 16384.0f;                                       // what codes in f16 are too small by

DEVICE Pieces codes_of(uint32 first, uint32 second) {                   // 16 codes in f16, in the order of `place_of`
    Pieces p;
    uint32 in[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {                                       // sign to bit 15 of a half, the rest to bits 11 to 9
        uint32 even = opaque_and(in[i], 0x0F0F0F0Fu), odd = opaque_and(in[i], 0xF0F0F0F0u);
        p.w[4 * i] = either_and(even << 12, even << 9, 0x8E008E00u);
        p.w[4 * i + 1] = either_and(odd << 8, odd << 5, 0x8E008E00u);
        p.w[4 * i + 2] = either_and(even << 4, even << 1, 0x8E008E00u);
        p.w[4 * i + 3] = either_and(odd, odd >> 3, 0x8E008E00u);
    }
    return p;
}

// Where a column of x or h stands: the codes of a word that share a register are neighbours.
DEVICE int place_of(int column) { return (column & ~7) + 2 * (column & 3) + (column >> 2 & 1); }

DEVICE float power_of_two(uint32 biased) { return __uint_as_float(biased << 23); }

// The sum of two products, of neighbouring groups, times the powers of two at `powers`.
DEVICE float scaled(float first, float second, const uint8* powers) {
    uint32 two = *(const uint16*)powers;
    return fmaf(first, power_of_two(two & 255), second * power_of_two(two >> 8));
}

struct Pipe { uint64 full[STAGES], empty[STAGES]; };                    // barriers of the places

DEVICE void init(Pipe& pipe) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&pipe.full[i]), 1);
        barrier_init(shared_address(&pipe.empty[i]), MEMBERS);
    }
    barrier_init_fence();
}

// The n-th product's rows, ROWS from n0 on of each expert (-1: none), on their way to their place. By one thread.
DEVICE void load(const uint8* w, const uint8* powers, const int* experts, int n0, uint8* shared, Pipe& pipe, int n) {
    int place = n % STAGES, there = 0;
    uint32 bar = shared_address(&pipe.full[place]), to = shared_address(shared + place * PLACE);
    if (n >= STAGES) barrier_wait(shared_address(&pipe.empty[place]), (n / STAGES - 1) & 1);
    for (int i = 0; i < AT_ONCE; ++i) there += experts[i] >= 0;
    barrier_expect(bar, there * ROWS * (ROW_BYTES + GROUPS));
    for (int i = 0; i < AT_ONCE; ++i) {
        if (experts[i] < 0) continue;
        long long row = (long long)experts[i] * N + n0;
        bulk_load(w + row * ROW_BYTES, to + i * ROWS * ROW_BYTES, bar, ROWS * ROW_BYTES);
        bulk_load(powers + row * GROUPS, to + POWERS_AT + i * ROWS * GROUPS, bar, ROWS * GROUPS);
    }
}

// This warp's share of the n-th product, whose first expert is the one-th of the tile: use(chunk, place, part), where lane
// 4 g + q has in part[0] and part[1] row g with columns 2 q and 2 q + 1, and in part[2] and part[3] row g + 8.
template <class Use> DEVICE void multiply_rows(const uint8* shared, Pipe& pipe, int n, int one, Use use) {
    int lane = threadIdx.x & 31, g = lane / 4, q = lane & 3;
    int expert = one + g / 4;                                           // of this lane's column
    bool there = expert < TAKEN && (g & 3) == q;
    const uint8 *place = shared + n % STAGES * PLACE, *upper = place + g * ROW_BYTES + q * 16, *lower = upper + 8 * ROW_BYTES;
    const uint8 *token = shared + TOKENS_AT + 2 * (expert * K + q * 32), *zeros = shared + ZEROS_AT;
    barrier_wait(shared_address(&pipe.full[n % STAGES]), n / STAGES & 1);
#pragma unroll 2
    for (int chunk = threadIdx.x / 32 % MEMBERS; chunk < CHUNKS; chunk += MEMBERS) {
        uint4 high = *(const uint4*)(upper + chunk * 64), low = *(const uint4*)(lower + chunk * 64);
        bool inside = there && (K % 128 == 0 || chunk * 128 + q * 32 < K);      // the last chunk may have two groups
        const uint8* mine = inside ? token + 256 * chunk : zeros;
        float part[4] = {}, more[4] = {};                               // two chains of products wait half as long
        multiply_chunk<64, true>(part, codes_of(high.x, high.y), codes_of(low.x, low.y), pieces_at(mine));
        multiply_chunk<64, true>(more, codes_of(high.z, high.w), codes_of(low.z, low.w), pieces_at(mine + 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] += more[i];
        use(chunk, place, part);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive_here(shared_address(&pipe.empty[n % STAGES]));
}

#if PART == 0

// Eight columns of x, to f16.
DEVICE uint4 staged(uint2 v) {
    uint32 halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) halves[i] = f16_of_e4m3((uint16)__byte_perm(v.x, v.y, 0x40 + 0x11 * i));
    return make_uint4(halves[0], halves[1], halves[2], halves[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
few_packed(const float* logits, const int* real, const uint8* x, const float* x_scale, long long scale_row, long long scale_group,
           const uint8* w, const uint8* powers, const float* bias, uint16* h, int first, int here, int ctas) {
    __shared__ float x_scales[CHUNKS], sums[TEAMS][2][MEMBERS][16];
    __shared__ Pipe pipe;
    __shared__ int experts[TOP];
    DYNAMIC_SHARED(shared);
    int token = blockIdx.x / ctas, lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, q = lane & 3;
    bool loads = warp == TEAMS * MEMBERS;
    if (loads && lane == 0) init(pipe);
    wait_for_previous();
    let_next_start();
    if (loads) {
        Choice chosen = choose(logits + (long long)token * EXPERTS);
#pragma unroll
        for (int k = 0; k < TOP; ++k)
            if (lane == 0) experts[k] = held(chosen.expert[k], first, here, real == 0 || token < *real);
    } else {
        for (int i = threadIdx.x; i < K / 8; i += TEAMS * TEAM)
            ((uint4*)(shared + TOKENS_AT))[i] = staged(((const uint2*)(x + (long long)token * K))[i]);
        if (threadIdx.x < CHUNKS) x_scales[threadIdx.x] = CODES * x_scale[token * scale_row + threadIdx.x * scale_group];
        if (threadIdx.x < 16) ((uint32*)(shared + ZEROS_AT))[threadIdx.x] = 0;
    }
    __syncthreads();
    auto next = [&](int tile) {                                         // from there on, of this CTA, whose expert is here
        while (tile < TILES && experts[tile / N_TILES] < 0) tile += ctas;
        return tile;
    };
    int tile = next(blockIdx.x % ctas);
    if (loads) {
        if (lane == 0)
            for (int n = 0; tile < TILES; tile = next(tile + ctas))
                load(w, powers, experts + tile / N_TILES, tile % N_TILES * ROWS, shared, pipe, n++);
        return;
    }
    int team = warp / MEMBERS, member = warp % MEMBERS;
    float gate_bias = 0.0f, up_bias = 0.0f;                             // of rows g and g + 8, asked for a tile ahead
    auto ask = [&] {
        if (tile >= TILES || member > 0 || q > 0) return;
        const float* biases = bias + (long long)experts[tile / N_TILES] * N + tile % N_TILES * ROWS + g;
        gate_bias = biases[0], up_bias = biases[8];
    };
    for (int i = 0; i < team; ++i) tile = next(tile + ctas);
    ask();
    for (int n = team; tile < TILES; n += TEAMS) {
        float gate = gate_bias, up = up_bias;
        int k = tile / N_TILES, n0 = tile % N_TILES * ROWS;
        for (int i = 0; i < TEAMS; ++i) tile = next(tile + ctas);
        ask();
        multiply_rows(shared, pipe, n, 0, [&](int chunk, const uint8* place, const float (&part)[4]) {
            int group = chunk * 4 + 2 * q;                              // of columns 0 to 3
            if (q > 1 || group >= GROUPS) return;
            const uint8* at = place + POWERS_AT + g * GROUPS + group;
            gate = fmaf(scaled(part[0], part[1], at), x_scales[chunk], gate);
            up = fmaf(scaled(part[2], part[3], at + 8 * GROUPS), x_scales[chunk], up);
        });
        gate += __shfl_xor_sync(~0u, gate, 1);
        up += __shfl_xor_sync(~0u, up, 1);
        float(&ours)[MEMBERS][16] = sums[team][n / TEAMS & 1];          // two in turn: one barrier a tile will do
        if (q == 0) ours[member][g] = gate, ours[member][g + 8] = up;
        named_sync(1 + team, TEAM);
        if (member > 0) continue;
#pragma unroll
        for (int from = 1; from < MEMBERS; ++from) gate += ours[from][g], up += ours[from][g + 8];
        float other = __shfl_xor_sync(~0u, g & 1 ? gate : up, 4);       // even rows take over the upper half, odd ones the lower
        float result = g & 1 ? swiglu(other, up, ALPHA, LIMIT) : swiglu(gate, other, ALPHA, LIMIT);
        int row = g & 1 ? g + 7 : g;                                    // of the gate
        if (q == 0) h[(long long)(token * TOP + k) * (N / 2) + place_of((n0 + row) / 2)] = (uint16)pack_f16(result, 0.0f);
    }
}

#else

extern "C" __global__ void __launch_bounds__(THREADS, 1)
few_packed(const float* logits, const int* real, const uint16* h, const uint8* w, const uint8* powers, const float* bias,
           const uint16* residual, uint16* out, int first, int here, int ctas) {
    __shared__ float weights[TOP], sums[TEAMS][2][MEMBERS][ROWS];
    __shared__ Pipe pipe;
    __shared__ int experts[PRODUCTS * AT_ONCE];
    DYNAMIC_SHARED(shared);
    int token = blockIdx.x / ctas, lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, q = lane & 3;
    if (warp == TEAMS * MEMBERS) {
        if (lane == 0) init(pipe);
        Choice chosen = choose(logits + (long long)token * EXPERTS);
        if (lane == 0) {
            experts[PRODUCTS * AT_ONCE - 1] = -1;                       // beside the last of an odd number
#pragma unroll
            for (int k = 0; k < TOP; ++k) {
                experts[k] = held(chosen.expert[k], first, here, real == 0 || token < *real);
                weights[k] = chosen.weight[k];
            }
        }
        __syncthreads();
        if (lane > 0) return;
        for (int n = 0, tile = blockIdx.x % ctas; tile < TILES; tile += ctas)
            for (int p = 0; p < PRODUCTS; ++p) load(w, powers, experts + p * AT_ONCE, tile * ROWS, shared, pipe, n++);
        return;
    }
    __syncthreads();
    int team = warp / MEMBERS, member = warp % MEMBERS, mine = member * 32 + lane;
    float biases[TOP], added = 0.0f;                                    // of row `mine`, asked for a tile ahead
    auto ask = [&](int tile) {
        if (tile >= TILES || mine >= ROWS) return;
        int row = tile * ROWS + mine;
#pragma unroll
        for (int k = 0; k < TOP; ++k)
            biases[k] = experts[k] < 0 ? 0.0f : __uint_as_float(load_once_u32(bias + (long long)experts[k] * N + row));
        if (residual != 0) added = low(load_once_u16(residual + (long long)token * N + row));
    };
    ask(blockIdx.x % ctas + team * ctas);
    wait_for_previous();
    let_next_start();
    for (int i = threadIdx.x; i < TOP * K / 8; i += TEAMS * TEAM)       // nobody wrote the rows of experts that are elsewhere
        copy_async(shared + TOKENS_AT + 16 * i, (const uint8*)(h + (long long)token * TOP * K) + 16 * i);
    if (threadIdx.x < 16) ((uint32*)(shared + ZEROS_AT))[threadIdx.x] = 0;
    copy_async_wait();
    named_sync(1 + TEAMS, TEAMS * TEAM);
    for (int n = team, tile = blockIdx.x % ctas + n * ctas; tile < TILES; n += TEAMS, tile += TEAMS * ctas) {
        float base = added, sum = 0.0f;                                 // base: residual and weighted biases
        if (mine < ROWS)
#pragma unroll
            for (int k = 0; k < TOP; ++k) base = fmaf(weights[k], biases[k], base);
        ask(tile + TEAMS * ctas);
#pragma unroll
        for (int p = 0; p < PRODUCTS; ++p) {
            int k = p * AT_ONCE + q / 2;                                // rows g with columns 0 to 3, rows g + 8 with 4 to 7
            float of_expert = 0.0f;
            multiply_rows(shared, pipe, n * PRODUCTS + p, p * AT_ONCE, [&](int chunk, const uint8* place, const float (&part)[4]) {
                int group = chunk * 4 + 2 * (q & 1);
                if (experts[k] >= 0 && group < GROUPS)
                    of_expert += scaled(q < 2 ? part[0] : part[2], q < 2 ? part[1] : part[3],
                                        place + POWERS_AT + (q / 2 * ROWS + g) * GROUPS + group);
            });
            if (experts[k] >= 0) sum = fmaf(of_expert, CODES * weights[k], sum);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        float(&ours)[MEMBERS][ROWS] = sums[team][n / TEAMS & 1];
        if (q == 0) ours[member][g] = sum;
        named_sync(1 + team, TEAM);
        if (mine >= ROWS) continue;
#pragma unroll
        for (int from = 0; from < MEMBERS; ++from) base += ours[from][mine];
        out[(long long)token * N + tile * ROWS + mine] = (uint16)pack_bf16(base, 0.0f);
    }
}

#endif
