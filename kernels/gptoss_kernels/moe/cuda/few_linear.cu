// Dense product for a few tokens, sm_90a: the reading of a weight matrix and nothing else that takes time.
//
//   y[t, n] = [residual[t, n] +] bias[n] + norm(x)[t] . w[n]            t < tokens <= TOKENS
//
// A CTA owns 16 rows of w; its eight warps share the columns, chunk by chunk. Every lane asks for all its weights (some 12
// to 16 pieces of 16 bytes) before anything else, so the whole matrix is on its way at once, and, launched as an
// overlapping kernel, before the kernel in front has ended: weights do not depend on it. Only then come the tokens.
//
// How weights and tokens meet in the products: few.cuh. The 128x128 scales of e4m3 weights multiply the fp32 sums of a chunk.
// RMSNorm costs no pass: 1 / rms of a token is one number, its squares are summed on the way, and the product is scaled at
// the end; what is rounded to bf16 is x * gain.
//
// STAGED: the tokens and the gain come to shared memory first, all at once, and a product waits for no L2; without, every
// chunk reads its share of them from there.
//
// EARLY: scales and bias are asked for with the weights, the residual with the tokens; without, each when it is needed.
//
// Compile-time: N, K, TOKENS (8, 16 or 32), E4M3, NORM, RESIDUAL, BIAS_BF16, EPS, STAGED, EARLY. N a multiple of 16, K of 64 (e4m3)
// or 32.
#include "few.cuh"

constexpr int WARPS = 8, ROWS = 16, TILES = TOKENS / 8;
constexpr int CHUNK = E4M3 ? 64 : 32, CHUNKS = K / CHUNK;               // 16 bytes a lane and row
constexpr int MINE = (CHUNKS + WARPS - 1) / WARPS;                      // chunks of a warp, at most
constexpr int MOST = TILES > 2 ? 4 : 8;                                  // that a lane asks for at once: registers
constexpr int BATCH = MINE < MOST ? MINE : MOST, BATCHES = (MINE + BATCH - 1) / BATCH;
constexpr int ROW_BYTES = E4M3 ? K : 2 * K, K_BLOCKS = (K + 127) / 128;
constexpr int OUTPUTS = (TOKENS * ROWS + WARPS * 32 - 1) / (WARPS * 32);       // of a thread, all in one column
constexpr int PITCH = STAGED ? K + 8 : K;                               // staged: eight rows lie in all banks
constexpr int GAIN_AT = TOKENS * PITCH * 2;                             // bytes
extern "C" __device__ const int few_linear_shared_bytes = STAGED ? GAIN_AT + (NORM ? 4 * K : 0) : 0;     // besides sums

DEVICE float bias_of(const void* bias, int n) {
    return BIAS_BF16 ? __uint_as_float((uint32)load_once_u16((const uint16*)bias + n) << 16)
                     : __uint_as_float(load_once_u32((const float*)bias + n));
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BATCH > 6 || TILES > 1 ? 2 : 3)
few_linear(const uint16* x, const uint8* w, const float* scale, const void* bias, const float* gain, const uint16* residual,
           uint16* y, int tokens) {
    __shared__ float sums[WARPS][TOKENS][ROWS + 1], squared[WARPS][TOKENS], row_scales[K_BLOCKS];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32, g = lane / 4, q = lane & 3, n0 = blockIdx.x * ROWS;
    const uint8* upper = w + (long long)(n0 + g) * ROW_BYTES + warp * 64 + q * 16;
    const uint8* lower = upper + 8 * ROW_BYTES;
    DYNAMIC_SHARED(staged);
    float acc[TILES][4] = {}, squares[TILES] = {}, my_bias = 0.0f, my_scale = 0.0f;
    uint16 added[OUTPUTS] = {};
    const float* scales = scale + n0 / 128 * K_BLOCKS;
#pragma unroll
    for (int batch = 0; batch < BATCHES; ++batch) {
        uint4 a[BATCH][2];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int turn = batch * BATCH + i;
            if (warp + turn * WARPS < CHUNKS) {
                a[i][0] = load_once(upper + turn * WARPS * 64);
                a[i][1] = load_once(lower + turn * WARPS * 64);
            }
        }
        if (batch == 0) {
            if (EARLY) my_bias = bias_of(bias, n0 + threadIdx.x % ROWS);
            if (EARLY && E4M3 && threadIdx.x < K_BLOCKS) my_scale = __uint_as_float(load_once_u32(scales + threadIdx.x));
            if (STAGED && NORM)
                for (int i = threadIdx.x; i < K / 4; i += WARPS * 32) copy_async(staged + GAIN_AT + 16 * i, gain + 4 * i);
            wait_for_previous();
            let_next_start();
            if (EARLY && RESIDUAL) {
#pragma unroll
                for (int o = 0; o < OUTPUTS; ++o) {
                    int i = threadIdx.x + o * WARPS * 32;
                    if (i < tokens * ROWS) added[o] = residual[(long long)(i / ROWS) * N + n0 + i % ROWS];
                }
            }
            if (STAGED) {
                for (int i = threadIdx.x; i < tokens * (K / 8); i += WARPS * 32) {
                    int t = i / (K / 8), piece = i % (K / 8);
                    copy_async(staged + t * (2 * PITCH) + 16 * piece, x + (long long)t * K + 8 * piece);
                }
                copy_async_wait();
            }
            if (EARLY && E4M3 && threadIdx.x < K_BLOCKS) row_scales[threadIdx.x] = my_scale;
            if (STAGED || EARLY && E4M3) __syncthreads();
            if (STAGED) {
                x = (const uint16*)staged;
                gain = (const float*)(staged + GAIN_AT);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            int chunk = warp + (batch * BATCH + i) * WARPS;
            if (chunk >= CHUNKS) continue;
            int k = chunk * CHUNK + q * (CHUNK / 4);
            Pieces up = weights_of<E4M3>(a[i][0]), down = weights_of<E4M3>(a[i][1]);
            float block_scale = !E4M3 ? 1.0f : EARLY ? row_scales[chunk * CHUNK / 128] : __ldg(scales + chunk * CHUNK / 128);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                int t = j * 8 + g;
                Pieces b = token_of<CHUNK, NORM>(x + (long long)t * PITCH + k, gain + k, t < tokens, squares[j]);
                float part[4] = {};
                float (&d)[4] = E4M3 ? part : acc[j];
                multiply_chunk<CHUNK>(d, up, down, b);
                if (E4M3) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) acc[j][c] = fmaf(part[c], block_scale, acc[j][c]);
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[warp][j * 8 + 2 * q + (c & 1)][g + (c & 2) * 4] = acc[j][c];
        if (NORM) {
            squares[j] += __shfl_xor_sync(~0u, squares[j], 1);
            squares[j] += __shfl_xor_sync(~0u, squares[j], 2);
            if (q == 0) squared[warp][j * 8 + g] = squares[j];
        }
    }
    __syncthreads();
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        int i = threadIdx.x + o * WARPS * 32, t = i / ROWS, n = i % ROWS;
        if (i >= tokens * ROWS) break;
        float sum = 0.0f, square = 0.0f;
#pragma unroll
        for (int from = 0; from < WARPS; ++from) {
            sum += sums[from][t][n];
            if (NORM) square += squared[from][t];
        }
        if (NORM) sum *= 1.0f / sqrtf(square / K + EPS);
        long long at = (long long)t * N + n0 + n;
        sum += EARLY ? my_bias : bias_of(bias, n0 + n);
        if (RESIDUAL) sum += __uint_as_float((uint32)(EARLY ? added[o] : residual[at]) << 16);
        y[at] = (uint16)pack_bf16(sum, 0.0f);
    }
}
