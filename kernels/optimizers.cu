#include "kernels/optimizers.h"

#include "kernels/tile/adamw.cuh"
#include "kernels/tile/flat.cuh"

namespace
{

using namespace tile;

/* N parameters as they lie in memory. */
template <typename T, typename G, int N> struct parameters {
    pack<T, N> weights;
    pack<G, N> grads;
    pack<float, N> first, second;

    __device__ void get(int64_t index, const T *p, const G *g, const float *m, const float *v)
    {
        weights = load<N>(p, index);
        grads = load<N>(g, index);
        first = load<N>(m, index);
        second = load<N>(v, index);
    }

    __device__ void step(const adamw_constants &k, int64_t index, T *p, float *m, float *v, G *copy)
    {
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            result[i] = weights[i];
            k.step(grads[i], result[i], first.at[i], second.at[i]);
        }
        store(m, index, first);
        store(v, index, second);
        store(p, index, rounded<T>(result));
        if (copy)
            store(copy, index, rounded<G>(result));
    }
};

/* A thread has a pack, or one of the parameters left over behind the last pack, and no second one: with loops, in which blocks
 * drift apart, the memory serves the streams at 3.2 to 4.05 TB/s, without at 4.26 (H200, 21 November 2026).
 *
 * The constants come from the host or, where on_device is not NULL, from what lies there: a thread of each block works them
 * out while the block's loads are on their way. */
template <typename T, typename G, int W>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_optimizer_adamw(adamw_constants k, const td_adamw *on_device, int64_t count, T *p, const G *g,
                       float *m, float *v, G *copy)
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
    if (on_device) {
        if (threadIdx.x == 0)
            shared = constants_of(*on_device);
        __syncthreads();
        k = shared;
    }
    if (thread < packs)
        mine.step(k, thread, p, m, v, copy);
    else if (left_over < count)
        one.step(k, left_over, p, m, v, copy);
}

__global__ void td_optimizer_advance(td_adamw *adamw)
{
    adamw->step += adamw->step < INT64_MAX;
}

template <typename T, int W>
__global__ void __launch_bounds__(FLAT_BLOCK) td_optimizer_sgd(float lr, int64_t count, T *p, const T *g)
{
    for_flat<W>(count, [&](auto width, int64_t index) {
        constexpr int N = decltype(width)::value;
        const pack<T, N> weights = load<N>(p, index), grads = load<N>(g, index);
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            result[i] = weights[i] - lr * grads[i];
        store(p, index, rounded<T>(result));
    });
}

template <typename T, typename G, int W>
cudaError_t adamw(cudaStream_t stream, const td_adamw *adamw, bool on_device, const td_adamw_tensors *t)
{
    const int64_t threads = t->count / W + t->count % W;

    td_optimizer_adamw<T, G, W><<<(unsigned)((threads - 1) / FLAT_BLOCK + 1), FLAT_BLOCK, 0, stream>>>(
        on_device ? adamw_constants() : constants_of(*adamw), on_device ? adamw : nullptr, t->count,
        (T *)t->p, (const G *)t->g, t->m, t->v, (G *)t->copy);
    return cudaGetLastError();
}

template <typename T, int W>
cudaError_t sgd(cudaStream_t stream, float lr, int64_t count, void *p, const void *g)
{
    td_optimizer_sgd<T, W>
        <<<flat_blocks(count, W, 1 << 24), FLAT_BLOCK, 0, stream>>>(lr, count, (T *)p, (const T *)g);
    return cudaGetLastError();
}

} // namespace

cudaError_t td_cuda_adamw_update(cudaStream_t stream, const td_adamw *a, bool on_device,
                                 const td_adamw_tensors *t)
{
    /* Beside f32 weights the gradients may be narrow; narrow weights have gradients of their own type. */
    return by_dtype_and_wide(t->grad_dtype, t->dtype, [&](auto grad_dtype, auto dtype) {
        using T = typename decltype(dtype)::element;
        using G = typename decltype(grad_dtype)::element;
        return packs_fit(1, t->count, t->p, t->g, t->m, t->v, t->copy)
                   ? adamw<T, G, 4>(stream, a, on_device, t)
                   : adamw<T, G, 1>(stream, a, on_device, t);
    });
}

cudaError_t td_cuda_adamw_advance(cudaStream_t stream, td_adamw *adamw)
{
    td_optimizer_advance<<<1, 1, 0, stream>>>(adamw);
    return cudaGetLastError();
}

cudaError_t td_cuda_sgd_step(cudaStream_t stream, float lr, int64_t count, td_dtype dtype, void *p,
                             const void *g)
{
    return by_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::element;
        return packs_fit(1, count, p, g) ? sgd<T, full_width<T>()>(stream, lr, count, p, g)
                                         : sgd<T, 1>(stream, lr, count, p, g);
    });
}
