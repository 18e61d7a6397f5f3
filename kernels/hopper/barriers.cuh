/** How the warps of a block wait for each other and for copies on Hopper, sm_90 and later (PTX ISA: mbarrier,
 * bar, setmaxnreg).
 *
 * A pipeline has a ring of stages in shared memory. Each stage has two barriers: `full` (the producer's
 * copies have arrived) and `empty` (all consumers have read them). Both sides keep a ring<STAGES>. The
 * consumer waits for full with `parity`, the producer for empty with `parity ^ 1`, which passes at once in
 * the first round. */
#ifndef TD_KERNELS_HOPPER_BARRIERS_CUH
#define TD_KERNELS_HOPPER_BARRIERS_CUH

#include "kernels/tile/shared.cuh"

namespace hopper
{

using tile::shared_address;

/** Threads of a warpgroup: 4 warps, the first with an index divisible by 4. */
constexpr int GROUP = 128;

/* ---- barriers in shared memory ---- */

__device__ inline void barrier_init(uint64_t *barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

/** Makes barriers visible to the copy engine. The other threads of the block see them after __syncthreads. */
__device__ inline void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(uint64_t *barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/** Arrives. The phase also waits for `bytes` from the copy engine. */
__device__ inline void barrier_expect(uint64_t *barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

/** Waits until the phase of that parity ends. The first phase has parity 0. Parity 1 passes at once on a
 * fresh barrier. */
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

/** The stage that comes next, and the parity of its phase. */
template <int STAGES> struct ring {
    int place = 0;
    uint32_t parity = 0;

    __device__ void advance()
    {
        if (++place == STAGES) {
            place = 0;
            parity ^= 1;
        }
    }
};

/* ---- named barriers, 1 to 15: `THREADS` counts the threads that sync and those that arrive ---- */

/** Arrives and waits for the others. */
template <int THREADS> __device__ inline void group_sync(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/** Arrives and does not wait. */
template <int THREADS> __device__ inline void group_arrive(int id)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* ---- clusters: blocks that run at the same time and read each other's shared memory ---- */

/** Waits for all threads of the cluster's blocks that have not ended, and for their writes. */
__device__ inline void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/** Loads from this address of the shared memory of block `rank` of the cluster. */
__device__ inline float2 load_pair_of_block(uint32_t address, int rank)
{
    float2 x;
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %2, %3;\n"
                 "ld.shared::cluster.v2.f32 {%0, %1}, [there];\n}"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address), "r"(rank)
                 : "memory");
    return x;
}

__device__ inline float4 load_four_of_block(uint32_t address, int rank)
{
    float4 x;
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address), "r"(rank)
                 : "memory");
    return x;
}

/* ---- registers: each warpgroup of a kernel with __launch_bounds__(threads, 1) may change its own number.
 * sm_90a only. The numbers are multiples of 8 from 24 to 240 ---- */

template <int REGISTERS> __device__ inline void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> __device__ inline void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

} // namespace hopper

#endif
