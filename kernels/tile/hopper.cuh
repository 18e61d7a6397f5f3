/** What Hopper adds for matrix kernels, sm_90a alone: barriers in shared memory, the bulk tensor copy engine,
 * clusters of blocks, products by a warpgroup (PTX ISA: mbarrier, cp.async.bulk.tensor, barrier.cluster,
 * wgmma).
 *
 * A panel is what the copy engine writes with 128-byte swizzle: rows of 64 16-bit elements, one every 128
 * bytes, on a 1024-byte boundary. With rows along the contraction it is an operand whose other index is
 * contiguous ("transposed"). */
#ifndef TD_KERNELS_TILE_HOPPER_CUH
#define TD_KERNELS_TILE_HOPPER_CUH

#include "kernels/tile/elements.cuh"
#include "kernels/tile/shared.cuh"

#include <cuda.h>

namespace tile
{

constexpr int PANEL_COLUMNS = 64, PANEL_ROW_BYTES = 128;

/* ---- barriers in shared memory ---- */

__device__ inline void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

/** Makes barriers visible to the copy engine and to the cluster. */
__device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/** At the barrier of that place in block `rank` of the cluster. Without .release.cluster, which waits for all
 * of the thread's memory: it is for memory that only the copy engine and products have touched, which have
 * their own order. */
__device__ inline void barrier_arrive_at(uint64_t *barrier, uint32_t rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

/** Arrives, and has the phase wait for `bytes` from the copy engine too. */
__device__ inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/** Waits for the end of the phase of that parity: 0 for a barrier's first; 1 passes at once on a fresh
 * barrier. */
__device__ inline void barrier_wait(uint64_t *barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

/** Which of a ring of places comes next, and the parity of its turn. */
template <int PLACES> struct ring {
    int place = 0;
    uint32_t parity = 0;

    __device__ void advance()
    {
        if (++place == PLACES) {
            place = 0;
            parity ^= 1;
        }
    }
};

/* ---- clusters ---- */

__device__ inline uint32_t cluster_rank()
{
    uint32_t rank;

    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ inline void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* ---- the copy engine ---- */

__device__ inline void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/** A policy of the level-2 cache for what others will read again: it goes last. */
__device__ inline uint64_t keep_policy()
{
    uint64_t policy;

    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/** The map's box at column x of row y. */
__device__ inline void copy_box(void *shared, const CUtensorMap *map, int x, int y, uint64_t *barrier,
                                uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}

/** The same to that place in every block of the cluster whose bit is set, each completing on its own
 * barrier. */
__device__ inline void copy_box_to(uint16_t blocks, void *shared, const CUtensorMap *map, int x, int y,
                                   uint64_t *barrier, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(
                     shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks), "l"(policy)
                 : "memory");
}

/* ---- bulk copies of arrays: addresses and sizes are multiples of 16 bytes ---- */

/** Loads; `barrier` counts the bytes as they come (barrier_expect). */
__device__ inline void bulk_load(void *shared, const void *from, uint32_t bytes, uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

/** Stores, as one of the stores that the next bulk_commit ends. */
__device__ inline void bulk_store(void *to, const void *shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

__device__ inline void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/** Waits until at most PENDING of the thread's latest groups have not read shared memory yet. */
template <int PENDING> __device__ inline void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/** Waits until at most PENDING of the thread's latest groups are under way. */
template <int PENDING> __device__ inline void bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/** Makes what this thread wrote to shared memory visible to bulk copies after it. */
__device__ inline void bulk_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/** Waits for THREADS threads of the block at its barrier `id`, 1 to 15. */
template <int THREADS> __device__ inline void group_sync(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* ---- products of a warpgroup ---- */

/** Panels as a transposed operand, panel_bytes from one to the next. 16 rows further on is PANEL_STEP
 * more. */
__device__ inline uint64_t transposed_panels(const void *shared, uint32_t panel_bytes)
{
    constexpr uint64_t SWIZZLE_128 = (uint64_t)1 << 62, EIGHT_ROWS = 8 * PANEL_ROW_BYTES;

    return SWIZZLE_128 | EIGHT_ROWS >> 4 << 32 | (uint64_t)(panel_bytes >> 4) << 16 |
           (shared_address(shared) & 0x3FFFF) >> 4;
}

constexpr uint64_t PANEL_STEP = 16 * PANEL_ROW_BYTES >> 4;

__device__ inline void product_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void product_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/** Waits until at most PENDING of the latest groups are under way. */
template <int PENDING> __device__ inline void product_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/** Waits for all, and keeps what reads the sums behind it. */
template <int N> __device__ inline void product_finish(float (&sums)[N])
{
    product_wait<0>();
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(sums[i])::"memory");
}

/* The 96 sums of a thread, as operands. */
#define TD_SUMS_8(i)                                                                                         \
    "+f"(sums[(i)]), "+f"(sums[(i) + 1]), "+f"(sums[(i) + 2]), "+f"(sums[(i) + 3]), "+f"(sums[(i) + 4]),     \
        "+f"(sums[(i) + 5]), "+f"(sums[(i) + 6]), "+f"(sums[(i) + 7])
#define TD_SUMS_32(i) TD_SUMS_8(i), TD_SUMS_8((i) + 8), TD_SUMS_8((i) + 16), TD_SUMS_8((i) + 24)
#define TD_NAMES                                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                 \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                       \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                       \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                       \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TD_PRODUCT(type)                                                                                     \
    asm volatile("{\n"                                                                                       \
                 ".reg .pred add;\n"                                                                         \
                 "setp.ne.b32 add, %98, 0;\n"                                                                \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" TD_NAMES                  \
                 "}, %96, %97, add, 1, 1, 1, 1;\n"                                                           \
                 "}"                                                                                         \
                 : TD_SUMS_32(0), TD_SUMS_32(32), TD_SUMS_32(64)                                             \
                 : "l"(a), "l"(b), "r"((int)add))

/** sums += or = A^T B for 64 columns of A and 192 of B, 16 rows of each, T bf16 or f16. A thread has of row
 * 16 (warp % 4) + lane / 4 + 8 h the columns 8 j + 2 (lane % 4) + i in sums[4 j + 2 h + i]. */
template <typename T>
__device__ inline void product_64x192_transposed(float (&sums)[96], uint64_t a, uint64_t b, bool add)
{
    if constexpr (std::is_same_v<T, bf16>)
        TD_PRODUCT("bf16");
    else
        TD_PRODUCT("f16");
}

#undef TD_PRODUCT
#undef TD_NAMES
#undef TD_SUMS_32
#undef TD_SUMS_8

} // namespace tile

#endif
