// In place of the kernels' own hopper.cuh: the instructions that few_linear.cu uses, on host threads, one for each thread of a
// CTA. Warps meet at a barrier for what they do together (shuffles, products), the CTA for __syncthreads. Slow, and exact in
// which thread holds what, which is what a kernel without a GPU can be wrong about.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
struct alignas(16) uint4 { uint32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct Index { int x; };

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define DEVICE inline
#define DYNAMIC_SHARED(name) alignas(1024) static uint8 name[1 << 18]

constexpr int MOST_WARPS = 32;
inline thread_local Index threadIdx, blockIdx;
inline std::unique_ptr<std::barrier<>> cta, warps[MOST_WARPS];
inline uint32 board[MOST_WARPS][32][8];                                 // what the lanes of a warp show each other

inline int warp_of() { return threadIdx.x / 32; }
inline int lane_of() { return threadIdx.x % 32; }
inline void meet() { warps[warp_of()]->arrive_and_wait(); }
inline void __syncthreads() { cta->arrive_and_wait(); }
inline uint4 make_uint4(uint32 x, uint32 y, uint32 z, uint32 w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline uint32 as_bits(float f) { uint32 bits; std::memcpy(&bits, &f, 4); return bits; }
template <class T> T __ldg(const T* at) { return *at; }

inline uint32 __byte_perm(uint32 a, uint32 b, uint32 selector) {
    uint8 bytes[8];
    std::memcpy(bytes, &a, 4);
    std::memcpy(bytes + 4, &b, 4);
    uint32 made = 0;
    for (int i = 0; i < 4; ++i) made |= (uint32)bytes[selector >> 4 * i & 7] << 8 * i;
    return made;
}

inline float __shfl_xor_sync(uint32, float value, int mask) {
    board[warp_of()][lane_of()][0] = as_bits(value);
    meet();
    float other = __uint_as_float(board[warp_of()][lane_of() ^ mask][0]);
    meet();
    return other;
}

inline uint32 to_bf16(float f) {                                        // round to nearest, ties to even
    uint32 bits = as_bits(f);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32 pack_bf16(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float bf16_at(uint32 word, int half) { return __uint_as_float(half ? word & 0xFFFF0000u : word << 16); }
inline uint32 multiply_bf16x2(uint32 a, uint32 b) {
    return pack_bf16(bf16_at(a, 0) * bf16_at(b, 0), bf16_at(a, 1) * bf16_at(b, 1));
}
inline uint4 load_once(const void* at) { return *(const uint4*)at; }
inline void copy_async(uint8* to, const void* from) { std::memcpy(to, from, 16); }
inline void copy_async_wait() {}
inline void wait_for_previous() {}
inline void let_next_start() {}

// m16n8k16: the PTX manual's places. A: row lane / 4 (+ 8 for a1, a3), columns 2 (lane % 4) (+ 8 for a2, a3). B: column
// lane / 4, rows 2 (lane % 4) (+ 8 for b1). D: row lane / 4 (+ 8 for d2, d3), columns 2 (lane % 4) + 0, 1.
inline void multiply(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    uint32 mine[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(board[warp_of()][lane_of()], mine, sizeof mine);
    meet();
    auto& all = board[warp_of()];
    for (int i = 0; i < 4; ++i) {
        int row = lane_of() / 4 + (i & 2) * 4, column = lane_of() % 4 * 2 + (i & 1);
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const uint32* a = all[row % 8 * 4 + k % 8 / 2];
            const uint32* b = all[column * 4 + k % 8 / 2];
            sum += (double)bf16_at(a[row / 8 + k / 8 * 2], k & 1) * bf16_at(b[4 + k / 8], k & 1);
        }
        d[i] = (float)sum;
    }
    meet();
}

// Every CTA of a grid, one after the other.
template <class Kernel, class... Arguments> void run_grid(int blocks, int threads, Kernel kernel, Arguments... arguments) {
    cta = std::make_unique<std::barrier<>>(threads);
    for (int w = 0; w < threads / 32; ++w) warps[w] = std::make_unique<std::barrier<>>(32);
    for (int block = 0; block < blocks; ++block) {
        std::vector<std::thread> all;
        for (int t = 0; t < threads; ++t)
            all.emplace_back([=] {
                threadIdx.x = t;
                blockIdx.x = block;
                kernel(arguments...);
            });
        for (auto& thread : all) thread.join();
    }
}
