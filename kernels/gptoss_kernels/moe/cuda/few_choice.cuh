// What both forms of a single token's experts share: the choice, made by every CTA from the router's logits, since a launch that
// chooses and tables of who is where would take longer; and f16 tokens in shared memory. EXPERTS and TOP are compile-time.
#pragma once
#include "few.cuh"

constexpr int HELD = (EXPERTS + 31) / 32;                               // logits of a lane

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

template <class T> DEVICE T pick(const T (&of)[TOP], int index) {       // of[index] without an address
    T found = of[0];
#pragma unroll
    for (int i = 1; i < TOP; ++i) found = index == i ? of[i] : found;
    return found;
}

// Of the experts chosen, those that are held here, from `first` on, are numbered from 0; the others and those of padding tokens
// are -1.
DEVICE int held(int expert, int first, int here, bool real) {
    return real && expert >= first && expert < first + here ? expert - first : -1;
}

DEVICE Pieces pieces_at(const uint8* at) {                              // 16 f16 numbers
    uint4 a = ((const uint4*)at)[0], b = ((const uint4*)at)[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
