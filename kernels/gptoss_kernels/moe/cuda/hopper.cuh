// The Hopper instructions the kernels here use, one thin function each: barriers in shared memory, the bulk tensor copy
// engine (TMA) with multicast over a cluster, warpgroup products (wgmma) in e4m3, registers moved between warpgroups.
// Products of few tokens use mma instead. Self-contained (no CUDA headers), so that both nvcc and NVRTC compile it without an
// include path.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

struct alignas(64) TensorMap { uint8 opaque[128]; };            // filled by cuTensorMapEncodeTiled on the host

#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint8 name[]

DEVICE uint32 shared_address(const void* p) { return (uint32)__cvta_generic_to_shared(p); }

// Read anew at each use: kept in a register across setmaxnreg it would be spilled.
DEVICE int thread_index() { int i; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i)); return i; }

// One lane of a whole warp, always the same. What only it does needs no loop over the lanes, as `lane == 0` would get.
DEVICE bool elect() {
    uint32 is;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
    return is;
}

DEVICE uint32 cluster_rank() { uint32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }

DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

DEVICE void barrier_init(uint32 bar, uint32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_expect(uint32 bar, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive_here(uint32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrive at the barrier at the same place in CTA `rank` of the cluster. No cluster-wide release: what the barriers order
// here is the copy engine's writes and the tensor core's reads, and a release would fence all of global memory each time.
DEVICE void barrier_arrive(uint32 bar, uint32 rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar), "r"(rank) : "memory");
}

DEVICE void barrier_wait(uint32 bar, uint32 parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(bar), "r"(parity) : "memory");
}

DEVICE void tma_prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((uint64)map) : "memory");
}

DEVICE void tma_load(const TensorMap* map, uint32 to, uint32 bar, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
                 "[%2];" ::"r"(to), "l"((uint64)map), "r"(bar), "r"(x), "r"(y) : "memory");
}

// `bytes` contiguous bytes (a multiple of 16, aligned to 16) to shared memory.
DEVICE void bulk_load(const void* from, uint32 to, uint32 bar, uint32 bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"((uint64)__cvta_generic_to_global(from)), "r"(bytes), "r"(bar) : "memory");
}

// A tensor load written to every CTA of `mask`, each CTA's own barrier told of its bytes.
DEVICE void tma_load_multicast(const TensorMap* map, uint32 to, uint32 bar, int x, int y, uint16 mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"((uint64)map), "r"(bar), "r"(x), "r"(y), "h"(mask)
                 : "memory");
}

// A box of a five-dimensional map, at x in the innermost and z in the outermost dimension.
DEVICE void tma_load_5d(const TensorMap* map, uint32 to, uint32 bar, int x, int z) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %5, %5, %5, "
                 "%4}], [%2];" ::"r"(to), "l"((uint64)map), "r"(bar), "r"(x), "r"(z), "r"(0) : "memory");
}

DEVICE void tma_load_5d_multicast(const TensorMap* map, uint32 to, uint32 bar, int x, int z, uint16 mask) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %6, %6, %6, %4}], [%2], %5;" ::"r"(to), "l"((uint64)map), "r"(bar), "r"(x), "r"(z),
                 "h"(mask), "r"(0) : "memory");
}

DEVICE uint32 load_shared(uint32 from) {
    uint32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(from));
    return word;
}

DEVICE uint32 load_shared_byte(uint32 from) {
    uint32 byte;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from));
    return byte;
}

DEVICE void store_shared(uint32 to, uint32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory"); }

DEVICE void store_matrix_x4(uint32 to, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

DEVICE void tma_store(const TensorMap* map, uint32 from, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"((uint64)map), "r"(from), "r"(x), "r"(y) : "memory");
}

// Adds bf16 to what is there, each sum rounded once; elements outside are left out, as by `tma_store`.
DEVICE void tma_add(const TensorMap* map, uint32 from, int x, int y) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"((uint64)map), "r"(from), "r"(x), "r"(y) : "memory");
}

DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most N of this thread's stores still read shared memory.
template <int COUNT> DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(COUNT) : "memory");
}

template <int COUNT> DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(COUNT) : "memory"); }

// Ordinary stores to shared memory become visible to the copy engine.
DEVICE void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int COUNT> DEVICE void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Descriptor of a K-major tile whose rows are 128 bytes, swizzled by 128: 8 rows are one group of 1024 bytes.
DEVICE uint64 tile_descriptor(uint32 address) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)1 << 16 | (uint64)64 << 32 | (uint64)1 << 62;
}

// Keeps the compiler from moving uses of an accumulator to before the wait that makes it valid.
template <int COUNT> DEVICE void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int COUNT> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory"); }

#define R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(d, i) R4(d, i), R4(d, i + 4), R4(d, i + 8), R4(d, i + 12)
#define R64(d) R16(d, 0), R16(d, 16), R16(d, 32), R16(d, 48)

#define W4(d, i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define W16(d, i) W4(d, i), W4(d, i + 4), W4(d, i + 8), W4(d, i + 12)
#define W64(d) W16(d, 0), W16(d, 16), W16(d, 32), W16(d, 48)

// d [64 x n] = or += a [64 x 32] . b [n x 32]^T for n of 8, 16, 128 and 192, b in shared memory, a there or in registers. The
// text of one: "ne" starts d anew and "eq" adds to it; places: %0 on, the registers of d; operands: what follows them.
#define PRODUCT(compare, shape, places, operands) \
    "{\n.reg .pred p;\nsetp." compare ".b32 p, 0, 0;\n" \
    "wgmma.mma_async.sync.aligned." shape ".f32.e4m3.e4m3 {" places "}, " operands ", p, 1, 1;\n}"
#define P4 "%0,%1,%2,%3"
#define P8 P4 ",%4,%5,%6,%7"
#define P64 \
    P8 ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63"
#define P96 P64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"

DEVICE void wgmma_first(float (&d)[64], uint64 a, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n128k32", P64, "%64, %65") : W64(d) : "l"(a), "l"(b));
}

DEVICE void wgmma_add(float (&d)[64], uint64 a, uint64 b) {
    asm volatile(PRODUCT("eq", "m64n128k32", P64, "%64, %65") : R64(d) : "l"(a), "l"(b));
}

DEVICE void wgmma_first(float (&d)[96], uint64 a, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n192k32", P96, "%96, %97") : W64(d), W16(d, 64), W16(d, 80) : "l"(a), "l"(b));
}

DEVICE void wgmma_add(float (&d)[96], uint64 a, uint64 b) {
    asm volatile(PRODUCT("eq", "m64n192k32", P96, "%96, %97") : R64(d), R16(d, 64), R16(d, 80) : "l"(a), "l"(b));
}

DEVICE void wgmma_first(float (&d)[8], uint64 a, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n16k32", P8, "%8, %9") : W4(d, 0), W4(d, 4) : "l"(a), "l"(b));
}

DEVICE void wgmma_add(float (&d)[8], uint64 a, uint64 b) {
    asm volatile(PRODUCT("eq", "m64n16k32", P8, "%8, %9") : R4(d, 0), R4(d, 4) : "l"(a), "l"(b));
}

DEVICE void wgmma_first(float (&d)[8], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n16k32", P8, "{%8,%9,%10,%11}, %12")
                 : W4(d, 0), W4(d, 4) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

DEVICE void wgmma_first(float (&d)[4], uint64 a, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n8k32", P4, "%4, %5") : W4(d, 0) : "l"(a), "l"(b));
}

DEVICE void wgmma_add(float (&d)[4], uint64 a, uint64 b) {
    asm volatile(PRODUCT("eq", "m64n8k32", P4, "%4, %5") : R4(d, 0) : "l"(a), "l"(b));
}

DEVICE void wgmma_first(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b) {
    asm volatile(PRODUCT("ne", "m64n8k32", P4, "{%4,%5,%6,%7}, %8")
                 : W4(d, 0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// Descriptor of 8 or 16 rows of 32 bytes: unswizzled, 128 bytes from 16 columns to the next, next_rows from 8 rows to the next.
DEVICE uint64 rows_descriptor(uint32 address, int next_rows) {
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)(128 >> 4) << 16 | (uint64)(next_rows >> 4) << 32;
}

// Launched as an overlapping kernel: everything the kernel before it wrote is visible after this. Else it returns at once.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next kernel, if it is launched as overlapping, may start as soon as all CTAs of this one have come here.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Named barrier of `threads` threads.
DEVICE void named_sync(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

DEVICE uint32 pack_bf16(float low, float high) {
    uint32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE uint16 pack_e4m3(float low, float high) {
    uint16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE uint32 pack_f16(float low, float high) {
    uint32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// a & b, once: the compiler would rather mask after each of the shifts that follow.
DEVICE uint32 opaque_and(uint32 a, uint32 b) {
    uint32 r;
    asm("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE uint32 either_and(uint32 a, uint32 b, uint32 mask) {             // (a | b) & mask
    uint32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xA8;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}

DEVICE uint32 f16_of_e4m3(uint16 two) {
    uint32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(two));
    return r;
}

DEVICE uint32 multiply_bf16x2(uint32 a, uint32 b) {
    uint32 r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Relaxed, so that it stays in front of the wait for the previous kernel: the compiler moves an ordinary load behind that.
DEVICE uint4 load_once(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// The same, and the L2 is to fetch all 128 bytes around it.
DEVICE uint4 load_once_and_more(const void* at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// The first of these of 4 and of 2 bytes.
DEVICE uint32 load_once_u32(const void* at) {
    uint32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

DEVICE uint16 load_once_u16(const void* at) {
    uint16 v;
    asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

// 16 bytes to shared memory, on their way when this returns; the wait is for all of this thread's.
DEVICE void copy_async(uint8* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)),
                 "l"((uint64)__cvta_generic_to_global(from)) : "memory");
}

DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same to an address in shared memory, in groups; the wait is for all but this thread's newest COUNT.
DEVICE void copy_async(uint32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to),
                 "l"((uint64)__cvta_generic_to_global(from)) : "memory");
}

DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int COUNT> DEVICE void copy_async_wait_all_but() { asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory"); }

// d [16 x 8] += a [16 x 16] . b [16 x 8], bf16 fragments in registers.
DEVICE void multiply(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same in f16.
DEVICE void multiply_f16(float (&d)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEVICE float fast_tanh(float x) { float r; asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float fast_exp2(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
DEVICE float fast_reciprocal(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
