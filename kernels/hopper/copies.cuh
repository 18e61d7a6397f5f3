/** Hopper's copy engine, sm_90 and later (PTX ISA: cp.async.bulk, cp.async.bulk.tensor,
 * cp.reduce.async.bulk).
 *
 * One thread issues a copy. A load adds its bytes to a barrier (barrier_expect). Stores and reduce-adds
 * belong to groups: bulk_commit ends a group, bulk_wait_read and bulk_wait wait for groups of the same
 * thread.
 *
 * A tensor copy moves a box of a tensor map (maps.cuh). Loads fill the part outside the tensor with zeros,
 * and always count the bytes of the whole box. Stores leave out the part outside. */
#ifndef TD_KERNELS_HOPPER_COPIES_CUH
#define TD_KERNELS_HOPPER_COPIES_CUH

#include "kernels/hopper/barriers.cuh"

#include <cuda.h>

namespace hopper
{

/* ---- arrays: addresses and sizes are multiples of 16 bytes ---- */

__device__ inline void bulk_load(void *shared, const void *from, uint32_t bytes, uint64_t *barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ inline void bulk_store(void *to, const void *shared, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/** Adds an array of f32 to global memory. The order of adds from several blocks is not fixed. */
__device__ inline void bulk_add(float *to, const float *shared, uint32_t bytes)
{
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

/* ---- groups of stores and reduce-adds ---- */

__device__ inline void bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/** Waits until all but the thread's latest PENDING groups have read shared memory. Their writes may still
 * be under way. */
template <int PENDING> __device__ inline void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/** Waits until all but the thread's latest PENDING groups have ended. Their writes are visible to this
 * thread. */
template <int PENDING> __device__ inline void bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

/** Makes this thread's writes to shared memory visible to later copies and wgmmas. The writing thread calls
 * it, before the barrier that lets another thread issue the copy or the wgmma. */
__device__ inline void bulk_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- tensors ---- */

__device__ inline void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/** Policies of the L2 cache. keep_policy is for data that other blocks will read again: it is evicted last.
 * once_policy is for data that is read once: it is evicted first. createpolicy.fractional gives these values
 * for fraction 1, as in CUTLASS. */
__device__ inline uint64_t keep_policy()
{
    return 0x14F0000000000000;
}

__device__ inline uint64_t once_policy()
{
    return 0x12F0000000000000;
}

/** Loads PANELS boxes of COLUMNS columns, `panel_bytes` apart in shared memory: all columns of some rows. */
template <int PANELS, int COLUMNS>
__device__ inline void load_tile(void *shared, uint32_t panel_bytes, const CUtensorMap *map, int row,
                                 int head, int group, uint64_t *barrier, uint64_t policy)
{
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared) +
                                                                                     p * panel_bytes),
                     "l"(map), "r"(p * COLUMNS), "r"(row), "r"(head), "r"(group),
                     "r"(shared_address(barrier)), "l"(policy)
                     : "memory");
}

__device__ inline void store_box(const CUtensorMap *map, const void *shared, int column, int row, int head,
                                 int group)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
        "r"(column), "r"(row), "r"(head), "r"(group), "r"(shared_address(shared))
        : "memory");
}

} // namespace hopper

#endif
