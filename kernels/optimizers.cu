#include "kernels/optimizers.h"

#include "kernels/tile/adamw.cuh"
#include "kernels/tile/flat.cuh"
#include "kernels/tile/launcher.cuh"

#include <string.h>

namespace
{

using namespace tile;

/* N parameters with their gradients and moments, in registers. */
template <typename T, typename G, int N> struct parameters {
    typename numbers<T>::template held<N> weights;
    pack<G, N> grads;
    pack<float, N> first, second;

    __device__ void get(int64_t index, numbers<T> p, const G *g, const float *m, const float *v)
    {
        weights = p.template load<N>(index);
        grads = load<N>(g, index);
        first = load<N>(m, index);
        second = load<N>(v, index);
    }

    __device__ void step(const adamw_constants &k, int64_t index, numbers<T> p, float *m, float *v)
    {
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            result[i] = weights[i];
            k.step(grads[i], result[i], first.at[i], second.at[i]);
        }
        store(m, index, first);
        store(v, index, second);
        p.store(index, result);
    }
};

/* A thread updates one pack, or one of the parameters after the last pack. There is no loop, because blocks
 * drift apart in loops: memory then reached 3.2 to 4.05 TB/s, and without a loop 4.26 (H200, 21 November
 * 2026).
 *
 * One thread of each block computes the constants while the block's loads are in flight. */
template <typename T, typename G, int W>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_optimizer_adamw(const td_adamw *adamw, const td_update_state *state, int64_t count, numbers<T> p,
                       const G *g, float *m, float *v)
{
    __shared__ adamw_constants shared;
    const int64_t thread = (int64_t)blockIdx.x * FLAT_BLOCK + threadIdx.x, packs = count / W;
    const int64_t left_over = packs * W + (thread - packs);
    parameters<T, G, W> mine;
    parameters<T, G, 1> one;

    if (thread < packs)
        mine.get(thread, p, g, m, v);
    else if (left_over < count)
        one.get(left_over, p, g, m, v);
    if (threadIdx.x == 0)
        shared = constants_of(*adamw, *state);
    __syncthreads();
    const adamw_constants k = shared;
    if (thread < packs)
        mine.step(k, thread, p, m, v);
    else if (left_over < count)
        one.step(k, left_over, p, m, v);
}

template <typename T, typename G, int W>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_optimizer_sgd(const td_sgd *sgd, const td_update_state *state, int64_t count, numbers<T> p, const G *g)
{
    const float lr = (float)sgd->lr, gain = state->gain;

    for_flat<W>(count, [&](auto width, int64_t index) {
        constexpr int N = decltype(width)::value;
        const auto weights = p.template load<N>(index);
        const pack<G, N> grads = load<N>(g, index);
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            result[i] = fmaf(-lr, __fmul_rn(gain, grads[i]), weights[i]);
        p.store(index, result);
    });
}

__global__ void td_optimizer_begin(td_update_state *state, float gain)
{
    state->step += state->step < INT64_MAX;
    state->gain = gain;
}

__global__ void td_optimizer_clip(float max_norm, const float *norm, td_update_state *state)
{
    const float factor = max_norm / (fabsf(state->gain) * *norm + 1e-6f);

    if (!(factor >= 1.0f)) /* true for NaN too */
        state->gain *= factor;
}

/* The bytes are an argument of the kernel, so the host may change them after the launch. */
struct carried {
    unsigned char bytes[TD_ASSIGN_MOST];
};

__global__ void td_optimizer_assign(unsigned char *to, carried from, int bytes)
{
    if ((int)threadIdx.x < bytes)
        to[threadIdx.x] = from.bytes[threadIdx.x];
}

template <typename T, typename G, int W>
cudaError_t adamw(cudaStream_t stream, const td_adamw *adamw, const td_update_state *state,
                  const td_update_tensors *t)
{
    const int64_t threads = t->count / W + t->count % W;

    td_optimizer_adamw<T, G, W><<<(unsigned)((threads - 1) / FLAT_BLOCK + 1), FLAT_BLOCK, 0, stream>>>(
        adamw, state, t->count, numbers<T>(t->p, t->low), (const G *)t->g, t->m, t->v);
    return cudaGetLastError();
}

template <typename T, typename G, int W>
cudaError_t sgd(cudaStream_t stream, const td_sgd *sgd, const td_update_state *state,
                const td_update_tensors *t)
{
    td_optimizer_sgd<T, G, W><<<flat_blocks(t->count, W, 1 << 24), FLAT_BLOCK, 0, stream>>>(
        sgd, state, t->count, numbers<T>(t->p, t->low), (const G *)t->g);
    return cudaGetLastError();
}

} // namespace

cudaError_t td_cuda_adamw_update(cudaStream_t stream, const td_adamw *a, const td_update_state *state,
                                 const td_update_tensors *t)
{
    return by_update_types(t, [&](auto stored, auto grad_dtype) {
        using T = typename decltype(stored)::element;
        using G = typename decltype(grad_dtype)::element;
        return packs_fit(1, t->count, t->p, t->low, t->g, t->m, t->v) ? adamw<T, G, 4>(stream, a, state, t)
                                                                      : adamw<T, G, 1>(stream, a, state, t);
    });
}

cudaError_t td_cuda_sgd_update(cudaStream_t stream, const td_sgd *s, const td_update_state *state,
                               const td_update_tensors *t)
{
    return by_update_types(t, [&](auto stored, auto grad_dtype) {
        using T = typename decltype(stored)::element;
        using G = typename decltype(grad_dtype)::element;
        return packs_fit(1, t->count, t->p, t->low, t->g) ? sgd<T, G, full_width<T, G>()>(stream, s, state, t)
                                                          : sgd<T, G, 1>(stream, s, state, t);
    });
}

LAUNCHER(td_update_begin, td_cuda_update_begin);
LAUNCHER(td_update_clip, td_cuda_update_clip);
LAUNCHER(td_assign, td_cuda_assign);

cudaError_t td_cuda_update_begin(cudaStream_t stream, td_update_state *state, float gain)
{
    td_optimizer_begin<<<1, 1, 0, stream>>>(state, gain);
    return cudaGetLastError();
}

cudaError_t td_cuda_update_clip(cudaStream_t stream, float max_norm, const float *norm,
                                td_update_state *state)
{
    td_optimizer_clip<<<1, 1, 0, stream>>>(max_norm, norm, state);
    return cudaGetLastError();
}

cudaError_t td_cuda_assign(cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    carried carry;

    memcpy(carry.bytes, from, bytes);
    td_optimizer_assign<<<1, TD_ASSIGN_MOST, 0, stream>>>((unsigned char *)to, carry, (int)bytes);
    return cudaGetLastError();
}
