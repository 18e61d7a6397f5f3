/* The updates of optimizers.cu on a few reserved SMs, so that they overlap with GEMMs on the other SMs.
 *
 * A block fills an SM: it asks for so much shared memory that no second block fits. One thread loads chunks
 * of weights, moments and gradients into a ring of stages with bulk copies. Another thread stores the
 * results, and the other warps compute. Without other kernels, each of 12 SMs moves 89 GB/s, each of 20 moves
 * 76, and each of 28 moves 78 (H100, 25 November 2026). One thread for loads and stores moved 83, 73 and 74.
 * The arithmetic is no limit: stores from registers, or loads without shared memory, made no step faster.
 *
 * The place of these SMs matters more than their number. A GEMM's cluster of 4 or 8 blocks needs that many
 * free SMs in one GPC. Update blocks in all GPCs leave too few free SMs in each: xl's GEMMs then take 38 ms,
 * even if the update blocks only wait. If whole clusters stay free the GEMMs take 27 ms. So a launch has a
 * block for each SM of the GPU. A block on an SM outside the update's set ends at once. The blocks that stay
 * share the chunks through a counter. If another kernel uses the update's SMs, the last blocks of the launch
 * stay on any SM. */
#include "kernels/optimizers.h"

#include "kernels/hopper/copies.cuh"
#include "kernels/tile/adamw.cuh"

namespace
{

using namespace hopper;
using namespace tile;

/* GROUPS groups of threads compute; each takes every GROUPS-th chunk. One thread of a further warp loads, and
 * one thread of the last warp stores. */
constexpr int GROUPS = 2, GROUP = 256, CONSUMERS = GROUPS * GROUP, THREADS = CONSUMERS + 64;
[[maybe_unused]] constexpr int LOADS = CONSUMERS, STORES = CONSUMERS + 32;
[[maybe_unused]] constexpr int WIDTH = 4, CHUNK = 2048; /* elements of a thread's load, and of a stage */
constexpr int MOST_BYTES = 227 * 1024;                  /* the most shared memory of a block on Hopper */
constexpr int LEAST_BYTES = 120 * 1024;                 /* keeps a second block off the SM */

/* A stage: weights of type T, f32 moments, gradients of type G. Every array begins at a multiple of 128
 * bytes. With stages of 28,688 bytes a step of 2.7B took 136 ms on 16 SMs, and with 28,672 bytes 106 ms. */
template <typename T, typename G, bool MOMENTS> struct stage {
    static constexpr int P_BYTES = CHUNK * sizeof(T), M_BYTES = MOMENTS ? CHUNK * sizeof(float) : 0,
                         BYTES = P_BYTES + 2 * M_BYTES + CHUNK * (int)sizeof(G);

    alignas(128) unsigned char bytes[BYTES];

    /* For planes: the high plane; low() is the low plane. */
    __device__ unsigned char *p()
    {
        return bytes;
    }

    __device__ unsigned char *low()
    {
        return bytes + P_BYTES / 2;
    }

    __device__ float *m()
    {
        return (float *)(bytes + P_BYTES);
    }

    __device__ float *v()
    {
        return (float *)(bytes + P_BYTES + M_BYTES);
    }

    __device__ G *g()
    {
        return (G *)(bytes + P_BYTES + 2 * M_BYTES);
    }
};

template <typename T, typename G, bool MOMENTS> struct layout {
    using one = stage<T, G, MOMENTS>;
    static constexpr int FIT = (MOST_BYTES - 1024) / (int)sizeof(one), STAGES = FIT < 12 ? FIT : 12;
    static constexpr int BYTES = STAGES * (int)sizeof(one) + 1024;
    static constexpr int ASKED = BYTES > LEAST_BYTES ? BYTES : LEAST_BYTES;

    one stages[STAGES];
    uint64_t full[STAGES], done[STAGES], empty[STAGES];
    int chunks[STAGES]; /* the chunk of each stage; END: no chunk is left */
    adamw_constants constants;
    bool stays; /* the block does not end at once */
};

/* TAKEN: chunks that a block takes at a time. Unused in code for other GPUs than Hopper, where the kernel is
 * empty. */
[[maybe_unused]] constexpr int END = -1, TAKEN = 4;

/* Counters that all blocks of a launch share. The last block sets them back to 0. */
struct turns {
    unsigned chunks, started, staying, ended;
};
static_assert(sizeof(turns) <= TD_UPDATE_WORK_BYTES);

struct arrays {
    int64_t count;
    void *p, *low;
    const void *g;
    float *m, *v;
    turns *shared;
    int sms;
    td_sm_set wanted;
};

/* Whether the block stays: it is on one of the update's SMs, or it is one of the last blocks and too few
 * others stay. */
[[maybe_unused]] __device__ inline bool stays(const arrays &a)
{
    uint32_t sm;

    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    const unsigned before = atomicAdd(&a.shared->started, 1);
    const bool wanted = sm < TD_SM_SET_MOST && (a.wanted.bits[sm / 32] >> sm % 32 & 1);
    if (!wanted && before + a.sms < gridDim.x)
        return false;
    return atomicAdd(&a.shared->staying, 1) < (unsigned)a.sms || wanted;
}

[[maybe_unused]] __device__ inline void leave(const arrays &a)
{
    __threadfence();
    if (atomicAdd(&a.shared->ended, 1) == gridDim.x - 1)
        *a.shared = {};
}

template <typename T, typename G, bool MOMENTS> struct update {
    using memory = layout<T, G, MOMENTS>;
    static constexpr int STAGES = memory::STAGES;
    static constexpr bool PLANES = std::is_same_v<T, planes>;
    static constexpr int EACH = PLANES ? 2 : sizeof(T); /* bytes of a weight in an array */

    memory &shared;
    const arrays &a;
    int64_t whole; /* number of elements that bulk copies move: a multiple of 16 bytes in each array */
    int chunks;    /* number of chunks of the launch, at least 1 */

    __device__ int size(int chunk) const
    {
        const int64_t left = whole - (int64_t)chunk * CHUNK;

        return left < CHUNK ? (int)left : CHUNK;
    }

    __device__ void wait_for_empty(int turn)
    {
        if (turn >= STAGES)
            barrier_wait(&shared.empty[turn % STAGES], (uint32_t)(turn / STAGES & 1) ^ 1);
    }

    /* Loads a chunk into the stage of `turn`. If no chunk is left, tells every group so and returns false. */
    __device__ bool load(int turn, int chunk)
    {
        auto &s = shared.stages[turn % STAGES];
        uint64_t *const full = &shared.full[turn % STAGES];

        for (int i = turn; chunk >= chunks && i < turn + GROUPS; i++) {
            wait_for_empty(i);
            shared.chunks[i % STAGES] = END;
            barrier_arrive(&shared.full[i % STAGES]);
        }
        if (chunk >= chunks)
            return false;
        const int64_t at = (int64_t)chunk * CHUNK;
        const uint32_t n = (uint32_t)size(chunk);
        wait_for_empty(turn);
        shared.chunks[turn % STAGES] = chunk;
        barrier_expect(full, n * (uint32_t)(sizeof(T) + sizeof(G) + (MOMENTS ? 8 : 0)));
        if (n == 0)
            return true;
        bulk_load(s.p(), (const char *)a.p + at * EACH, n * EACH, full);
        if constexpr (PLANES)
            bulk_load(s.low(), (const char *)a.low + at * EACH, n * EACH, full);
        bulk_load(s.g(), (const G *)a.g + at, n * sizeof(G), full);
        if constexpr (MOMENTS) {
            bulk_load(s.m(), a.m + at, n * sizeof(float), full);
            bulk_load(s.v(), a.v + at, n * sizeof(float), full);
        }
        return true;
    }

    __device__ void store(int turn)
    {
        auto &s = shared.stages[turn % STAGES];
        const int chunk = shared.chunks[turn % STAGES];
        const int64_t at = (int64_t)chunk * CHUNK;
        const uint32_t n = (uint32_t)size(chunk);

        if (n > 0) {
            bulk_store((char *)a.p + at * EACH, s.p(), n * EACH);
            if constexpr (PLANES)
                bulk_store((char *)a.low + at * EACH, s.low(), n * EACH);
            if constexpr (MOMENTS) {
                bulk_store(a.m + at, s.m(), n * sizeof(float));
                bulk_store(a.v + at, s.v(), n * sizeof(float));
            }
        }
        bulk_commit();
    }

    /* Runs in the thread that loads. It asks for the next chunks before it needs them. */
    __device__ void load_all()
    {
        unsigned now = atomicAdd(&a.shared->chunks, TAKEN), next = atomicAdd(&a.shared->chunks, TAKEN);
        int used = 0;
        bool more = true;

        for (int turn = 0; more; turn++) {
            if (used == TAKEN) {
                now = next;
                next = atomicAdd(&a.shared->chunks, TAKEN);
                used = 0;
            }
            more = load(turn, (int)now + used++);
        }
    }

    /* Runs in the thread that stores. A stage is empty when its store has read it; this is known after the
     * wait of the next store. */
    __device__ void store_all()
    {
        for (int turn = 0;; turn++) {
            const uint32_t parity = (uint32_t)(turn / STAGES & 1);

            barrier_wait(&shared.full[turn % STAGES], parity);
            if (shared.chunks[turn % STAGES] == END)
                break;
            barrier_wait(&shared.done[turn % STAGES], parity);
            store(turn);
            bulk_wait_read<1>();
            if (turn > 0)
                barrier_arrive(&shared.empty[(turn - 1) % STAGES]);
        }
        bulk_wait<0>();
    }

    template <typename F> __device__ void compute(F step)
    {
        const int thread = (int)threadIdx.x % GROUP;

        for (int turn = (int)threadIdx.x / GROUP;; turn += GROUPS) {
            auto &s = shared.stages[turn % STAGES];

            barrier_wait(&shared.full[turn % STAGES], (uint32_t)(turn / STAGES & 1));
            const int chunk = shared.chunks[turn % STAGES];
            if (chunk == END)
                return;
            const int n = size(chunk);
#pragma unroll
            for (int at = thread * WIDTH; at < CHUNK; at += GROUP * WIDTH)
                if (at < n)
                    one<WIDTH>(step, numbers<T>(s.p() + at * EACH, s.low() + at * EACH), s.g() + at,
                               s.m() + at, s.v() + at);
            /* The few elements that do not fill 16 bytes. */
            const int64_t rest = whole + thread;
            if (chunk == chunks - 1 && rest < a.count)
                one<1>(step, numbers<T>((char *)a.p + rest * EACH, (char *)a.low + rest * EACH),
                       (const G *)a.g + rest, a.m + rest, a.v + rest);
            bulk_fence();
            barrier_arrive(&shared.done[turn % STAGES]);
        }
    }

    /* Updates N elements in shared memory, or single elements in GPU memory. */
    template <int N, typename F>
    __device__ static void one(F step, numbers<T> p, const G *g, float *m, float *v)
    {
        const auto weights = p.template load<N>(0);
        const pack<G, N> grads = tile::load<N>(g, 0);
        pack<float, N> first = {}, second = {};
        float result[N];

        if constexpr (MOMENTS) {
            first = tile::load<N>(m, 0);
            second = tile::load<N>(v, 0);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            result[i] = weights[i];
            step(grads[i], result[i], first.at[i], second.at[i]);
        }
        if constexpr (MOMENTS) {
            tile::store(m, 0, first);
            tile::store(v, 0, second);
        }
        p.store(0, result);
    }
};

template <typename T, typename G, bool MOMENTS>
__global__ void __launch_bounds__(THREADS, 1)
    td_optimizer_sms(const void *hyper, const td_update_state *state, const __grid_constant__ arrays a)
{
#if defined __CUDA_ARCH__ && __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    auto &shared = *reinterpret_cast<layout<T, G, MOMENTS> *>(memory);
    const int64_t whole = a.count / 8 * 8;
    update<T, G, MOMENTS> mine = {shared, a, whole, whole > 0 ? (int)((whole - 1) / CHUNK + 1) : 1};

    if (threadIdx.x == 0) {
        shared.stays = stays(a);
        for (int i = 0; i < mine.STAGES; i++) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.done[i], GROUP);
            barrier_init(&shared.empty[i], 1);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (!shared.stays) {
        if (threadIdx.x == 0)
            leave(a);
        return;
    }
    if (threadIdx.x == LOADS)
        mine.load_all();
    if (threadIdx.x == STORES) {
        mine.store_all();
        leave(a);
    }
    if (threadIdx.x >= CONSUMERS)
        return;
    /* Thread 0 computes the constants while the first chunks are in flight. */
    if (threadIdx.x == 0) {
        if constexpr (MOMENTS) {
            shared.constants = constants_of(*(const td_adamw *)hyper, *state);
        } else {
            shared.constants.rate = (float)((const td_sgd *)hyper)->lr;
            shared.constants.gain = state->gain;
        }
    }
    group_sync<CONSUMERS>(1);
    const adamw_constants k = shared.constants;
    if constexpr (MOMENTS)
        mine.compute([&](float grad, float &weight, float &first, float &second) {
            k.step(grad, weight, first, second);
        });
    else
        mine.compute([&](float grad, float &weight, float &, float &) {
            weight = fmaf(-k.rate, __fmul_rn(k.gain, grad), weight);
        });
#else
    __trap(); /* the host launches this kernel only if it is compiled for Hopper */
#endif
}

/* ---- on the host ---- */

template <typename T, typename G, bool MOMENTS>
cudaError_t launch(cudaStream_t stream, const td_sm_set *wanted, const void *hyper,
                   const td_update_state *state, const td_update_tensors *t)
{
    constexpr int BYTES = layout<T, G, MOMENTS>::ASKED;
    const auto kernel = td_optimizer_sms<T, G, MOMENTS>;
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);

    if (code != cudaSuccess)
        return code;
    static_assert(sizeof(layout<T, G, MOMENTS>) <= BYTES && BYTES <= MOST_BYTES);
    kernel<<<(unsigned)(wanted->all + t->sms), THREADS, BYTES, stream>>>(
        hyper, state, {t->count, t->p, t->low, t->g, t->m, t->v, (turns *)t->work, t->sms, *wanted});
    return cudaGetLastError();
}

template <bool MOMENTS>
cudaError_t by_moments(cudaStream_t stream, const td_sm_set *wanted, const void *hyper,
                       const td_update_state *state, const td_update_tensors *t)
{
    return by_update_types(t, [&](auto stored, auto grad_dtype) {
        return launch<typename decltype(stored)::element, typename decltype(grad_dtype)::element, MOMENTS>(
            stream, wanted, hyper, state, t);
    });
}

} // namespace

bool td_cuda_update_sms_built(void)
{
    cudaFuncAttributes code;
    const auto kernel = td_optimizer_sms<float, float, true>;

    /* ptxVersion is the architecture that the code was compiled for, 10 major + minor. */
    return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
}

bool td_cuda_update_sms_fits(const td_update_tensors *t)
{
    return packs_fit(1, t->count, t->p, t->low, t->g, t->m, t->v);
}

cudaError_t td_cuda_adamw_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_adamw *adamw,
                                     const td_update_state *state, const td_update_tensors *tensors)
{
    return by_moments<true>(stream, wanted, adamw, state, tensors);
}

cudaError_t td_cuda_sgd_update_sms(cudaStream_t stream, const td_sm_set *wanted, const td_sgd *sgd,
                                   const td_update_state *state, const td_update_tensors *tensors)
{
    return by_moments<false>(stream, wanted, sgd, state, tensors);
}
