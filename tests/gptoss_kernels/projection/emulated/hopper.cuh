// In place of the kernels' own hopper.cuh: the instructions that few_linear.cu, few_experts.cu and decode_gemm.cu use, on the
// host. Every thread of a CTA is a stack of its own, and one after the other runs until it has to wait: warps meet for what
// they do together (shuffles, products), the CTA for __syncthreads. Copies and products are done when they are asked for. Slow,
// and exact in which thread holds what and in when a barrier in shared memory opens, which is what a kernel without a GPU can
// be wrong about. If nobody can go on, the process ends and says so.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <ucontext.h>
#include <vector>

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
struct alignas(16) uint4 { uint32 x, y, z, w; };
struct alignas(8) uint2 { uint32 x, y; };
struct alignas(8) float2 { float x, y; };
struct Index { int x; };

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define DEVICE inline
#define DYNAMIC_SHARED(name) uint8* name = shared_memory
alignas(1024) inline uint8 shared_memory[1 << 18];

constexpr int MOST_WARPS = 32;
inline Index threadIdx, blockIdx, gridDim;

constexpr int STACK = 1 << 16;
struct Thread { jmp_buf at; bool begun = false, done = false; };
inline std::vector<Thread> threads_of_cta;
inline std::vector<uint8> stacks;
inline jmp_buf turn_taker;
inline long changes = 0;                                                // what a waiting thread may be waiting for
inline void (*body)(const void* call);                                  // with the kernel's call: <functional> compiles long
inline const void* kernel_call;

inline void await_turn() {                                                   // the others' turn
    if (_setjmp(threads_of_cta[threadIdx.x].at) == 0) _longjmp(turn_taker, 1);
}
inline void begin_thread() {
    body(kernel_call);
    threads_of_cta[threadIdx.x].done = true, ++changes;
    _longjmp(turn_taker, 1);
}
inline void take_turn(int thread) {
    threadIdx.x = thread;
    Thread& t = threads_of_cta[thread];
    if (_setjmp(turn_taker)) return;
    if (t.begun) _longjmp(t.at, 1);
    t.begun = true;
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = stacks.data() + (long long)thread * STACK, fresh.uc_stack.ss_size = STACK, fresh.uc_link = nullptr;
    makecontext(&fresh, begin_thread, 0);
    setcontext(&fresh);
}

struct Meeting {                                                        // of as many threads, again and again
    int expected = 0, missing = 0, number = 0;
    explicit Meeting(int threads = 0) : expected(threads), missing(threads) {}
    void arrive_and_wait() {
        int mine = number;
        ++changes;
        if (--missing == 0) missing = expected, ++number;
        else while (number == mine) await_turn();
    }
};
inline Meeting cta, warps[MOST_WARPS];
inline std::map<int, Meeting> named;
inline uint32 board[MOST_WARPS][32][8];                                 // what the lanes of a warp show each other

inline int warp_of() { return threadIdx.x / 32; }
inline int lane_of() { return threadIdx.x % 32; }
inline void meet() { warps[warp_of()].arrive_and_wait(); }
inline void __syncthreads() { cta.arrive_and_wait(); }
inline void __syncwarp() { meet(); }
inline bool elect() { return lane_of() == 0; }
inline void named_sync(int name, int threads) { named.try_emplace(name, threads).first->second.arrive_and_wait(); }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint2 make_uint2(uint32 x, uint32 y) { return {x, y}; }
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

template <class T> T __shfl_sync(uint32, T value, int from) {            // of four bytes
    std::memcpy(board[warp_of()][lane_of()], &value, 4);
    meet();
    std::memcpy(&value, board[warp_of()][from], 4);
    meet();
    return value;
}
template <class T> T __shfl_xor_sync(uint32 all, T value, int mask) { return __shfl_sync(all, value, lane_of() ^ mask); }

inline uint32 __reduce_max_sync(uint32 all, uint32 value) {
    for (int mask = 16; mask; mask /= 2) value = std::max(value, __shfl_xor_sync(all, value, mask));
    return value;
}
inline uint32 __reduce_min_sync(uint32 all, uint32 value) { return ~__reduce_max_sync(all, ~value); }

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
inline uint4 load_once_and_more(const void* at) { return load_once(at); }
inline uint32 load_once_u32(const void* at) { return *(const uint32*)at; }
inline uint16 load_once_u16(const void* at) { return *(const uint16*)at; }
inline void copy_async(uint8* to, const void* from) { std::memcpy(to, from, 16); }
inline void copy_async_wait() {}
inline void wait_for_previous() {}
inline void let_next_start() {}

typedef _Float16 half;
inline uint32 to_f16(float f) { half h = (half)f; uint16 bits; std::memcpy(&bits, &h, 2); return bits; }
inline uint32 pack_f16(float low, float high) { return to_f16(low) | to_f16(high) << 16; }
inline float f16_at(uint32 word, int place) {
    uint16 bits = word >> 16 * place;
    half h;
    std::memcpy(&h, &bits, 2);
    return (float)h;
}

// m16n8k16: the PTX manual's places. A: row lane / 4 (+ 8 for a1, a3), columns 2 (lane % 4) (+ 8 for a2, a3). B: column
// lane / 4, rows 2 (lane % 4) (+ 8 for b1). D: row lane / 4 (+ 8 for d2, d3), columns 2 (lane % 4) + 0, 1.
inline void multiply_16(float (*number)(uint32, int), float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0,
                        uint32 b1) {
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
            sum += (double)number(a[row / 8 + k / 8 * 2], k & 1) * number(b[4 + k / 8], k & 1);
        }
        d[i] = (float)sum;
    }
    meet();
}
template <class... Words> void multiply(float (&d)[4], Words... words) { multiply_16(bf16_at, d, words...); }
template <class... Words> void multiply_f16(float (&d)[4], Words... words) { multiply_16(f16_at, d, words...); }

inline float from_e4m3(uint8 byte) {
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return byte & 128 ? -size : size;
}
inline uint8 to_e4m3(float f) {                                         // round to nearest, ties to even, clamped
    float size = std::fmin(std::fabs(f), 448.0f);
    int exponent = size > 0 ? std::max(std::ilogb(size), -6) : -6, units = (int)std::nearbyint(std::ldexp(size, 3 - exponent));
    return (std::signbit(f) ? 128 : 0) | (units + ((exponent + 6) << 3));
}
inline uint32 opaque_and(uint32 a, uint32 b) { return a & b; }
inline uint32 either_and(uint32 a, uint32 b, uint32 mask) { return (a | b) & mask; }
inline uint16 pack_e4m3(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline uint32 f16_of_e4m3(uint16 two) { return pack_f16(from_e4m3((uint8)two), from_e4m3(two >> 8)); }
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

// Addresses in shared memory are offsets.
inline uint32 shared_address(const void* at) { return (const uint8*)at - shared_memory; }
inline uint32 load_shared(uint32 from) { uint32 word; std::memcpy(&word, shared_memory + from, 4); return word; }
inline uint32 load_shared_byte(uint32 from) { return shared_memory[from]; }

struct Barrier { int count = 0, missing = 0, bytes = 0, phase = 0; };   // missing arrivals and bytes of the phase
inline std::map<uint32, Barrier> barriers;
inline void change(uint32 bar, int arrivals, int bytes) {
    Barrier& b = barriers.at(bar);
    b.missing -= arrivals, b.bytes += bytes;
    if (b.missing == 0 && b.bytes == 0) b.missing = b.count, b.phase ^= 1, ++changes;
}
inline void barrier_init(uint32 bar, uint32 count) { barriers[bar] = {(int)count, (int)count, 0, 0}; }
inline void barrier_init_fence() {}
inline void barrier_expect(uint32 bar, uint32 bytes) { change(bar, 1, bytes); }
inline void barrier_arrive_here(uint32 bar) { change(bar, 1, 0); }
inline void barrier_wait(uint32 bar, uint32 parity) {
    while (barriers.at(bar).phase == (int)parity) await_turn();
}

struct TensorMap { const uint8* from; int rows, columns; };             // of bytes; boxes of 64 rows and 128 columns
inline void tma_prefetch_map(const TensorMap*) {}
inline void tma_load(const TensorMap* map, uint32 to, uint32 bar, int x, int y) {
    for (int r = 0; r < 64; ++r)
        for (int c = 0; c < 128; ++c)
            shared_memory[to + r * 128 + ((c / 16 ^ (r & 7)) * 16) + c % 16] =
                y + r < map->rows && x + c < map->columns ? map->from[(long long)(y + r) * map->columns + x + c] : 0;
    change(bar, 0, -64 * 128);
}
inline void bulk_load(const void* from, uint32 to, uint32 bar, uint32 bytes) {
    std::memcpy(shared_memory + to, from, bytes);
    change(bar, 0, -(int)bytes);
}

inline void async_fence() {}
template <int COUNT> void registers_grow() {}
template <int COUNT> void registers_shrink() {}
template <int COUNT> void pin(float (&)[COUNT]) {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int COUNT> void wgmma_wait() {}
inline uint64 tile_descriptor(uint32 address) { return address >> 4; }
inline uint64 rows_descriptor(uint32 address, int next_rows) { return address >> 4 | (uint64)next_rows << 32; }

// This thread's results of a product of 32 columns: rows of a from its warp's 16 (32 bytes each), tokens at descriptor b.
template <int COUNT, class A> void product(float (&d)[COUNT], bool first, A a, uint64 b) {
    for (int i = 0; i < COUNT; ++i) {
        int row = lane_of() / 4 + (i & 2) * 4, column = i / 4 * 8 + lane_of() % 4 * 2 + (i & 1);
        const uint8* token = shared_memory + (uint32)b * 16 + column / 8 * (b >> 32) + column % 8 * 16;
        double sum = first ? 0.0 : d[i];
        for (int k = 0; k < 32; ++k)
            sum += (double)from_e4m3(a(row, k)) * from_e4m3(token[k / 16 * 128 + k % 16]);
        d[i] = (float)sum;
    }
}
template <int COUNT> void from_shared(float (&d)[COUNT], bool first, uint64 a, uint64 b) {
    product(d, first, [=](int row, int k) {
        uint32 at = a * 16 + (warp_of() % 4 * 16 + row) * 128 + k;
        return shared_memory[at ^ (at >> 7 & 7) << 4];
    }, b);
}
template <int COUNT> void wgmma_first(float (&d)[COUNT], uint64 a, uint64 b) { from_shared(d, true, a, b); }
template <int COUNT> void wgmma_add(float (&d)[COUNT], uint64 a, uint64 b) { from_shared(d, false, a, b); }
template <int COUNT>
void wgmma_first(float (&d)[COUNT], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    uint32 mine[4] = {a0, a1, a2, a3};                                  // row lane / 4 (+ 8: a1, a3), four columns (+ 16: a2, a3)
    std::memcpy(board[warp_of()][lane_of()], mine, sizeof mine);
    meet();
    product(d, true, [](int row, int k) {
        return (uint8)(board[warp_of()][row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8);
    }, b);
    meet();
}

// Every CTA of a grid, one after the other.
template <class Kernel, class... Arguments> void run_grid(int blocks, int threads, Kernel kernel, Arguments... arguments) {
    stacks.resize((long long)threads * STACK);
    auto call = [=] { kernel(arguments...); };
    body = [](const void* of) { (*(const decltype(call)*)of)(); }, kernel_call = &call;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        threads_of_cta.assign(threads, Thread{});
        cta = Meeting(threads), named.clear();
        for (int w = 0; w < threads / 32; ++w) warps[w] = Meeting(32);
        for (bool left = true; left;) {
            long before = changes;
            left = false;
            for (int t = 0; t < threads; ++t) {
                if (!threads_of_cta[t].done) take_turn(t);
                left |= !threads_of_cta[t].done;
            }
            if (left && changes == before) std::fprintf(stderr, "all threads of CTA %d wait\n", blockIdx.x), std::abort();
        }
    }
}
