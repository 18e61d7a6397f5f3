/** What Hopper adds, from sm_90 on: barriers in shared memory, and bulk copies by the copy engine (PTX ISA:
 * mbarrier, cp.async.bulk). */
#ifndef TD_KERNELS_TILE_HOPPER_CUH
#define TD_KERNELS_TILE_HOPPER_CUH

#include "kernels/tile/elements.cuh"
#include "kernels/tile/shared.cuh"

namespace tile
{

/* ---- barriers in shared memory ---- */

__device__ inline void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

/** Makes barriers visible to the copy engine. */
__device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
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

} // namespace tile

#endif
