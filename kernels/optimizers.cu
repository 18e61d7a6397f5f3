#include "kernels/optimizers.h"

#include "kernels/tile/flat.cuh"

namespace
{

using namespace tile;

/* A step in the form all variants share, its constants computed in float64 and rounded once:
 *   m += gain1 (g - m),  v = beta2 v + gain2 g^2,  p -= rate m / (sqrt(v) root + eps),
 * and p -= decay p before that or after it. */
struct constants {
    float gain1, beta2, gain2, rate, root, eps, decay;
    bool decay_last;

    __device__ void set(const td_adamw &a)
    {
        const bool torch = a.variant == TD_ADAMW_TORCH;
        const double correction1 = 1.0 - pow(a.beta1, (double)a.step);
        const double correction2 = 1.0 - pow(a.beta2, (double)a.step);

        gain1 = (float)(1.0 - a.beta1);
        beta2 = (float)a.beta2;
        gain2 = (float)(1.0 - a.beta2);
        rate = (float)(a.lr * (torch ? 1.0 : sqrt(correction2)) / correction1);
        root = (float)(torch ? 1.0 / sqrt(correction2) : 1.0);
        eps = (float)a.eps;
        decay = (float)(a.lr * a.weight_decay);
        decay_last = a.variant == TD_ADAMW_COURSE2025;
    }
};

/* How many turns of a pack a thread takes. Working out the constants, with two powers in float64, takes a block as long as
 * some turns; but of few blocks that take many turns each the memory keeps fewer pages open (3.6 TB/s with 264 blocks, 4.1
 * with 100,000, on an H200, November 2026). */
constexpr int64_t TURNS = 16;

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

    __device__ void step(const constants &k, int64_t index, T *p, float *m, float *v, G *copy)
    {
        float result[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float grad = grads[i];
            float weight = weights[i];
            first.at[i] += k.gain1 * (grad - first.at[i]);
            second.at[i] = k.beta2 * second.at[i] + k.gain2 * (grad * grad);
            if (!k.decay_last)
                weight -= k.decay * weight;
            weight -= k.rate * (first.at[i] / (sqrtf(second.at[i]) * k.root + k.eps));
            if (k.decay_last)
                weight -= k.decay * weight;
            result[i] = weight;
        }
        store(m, index, first);
        store(v, index, second);
        store(p, index, rounded<T>(result));
        if (copy)
            store(copy, index, rounded<G>(result));
    }
};

/* Hyperparameters by value or, where on_device is not NULL, from there: either way the constants come out the same. */
template <typename T, typename G, int W>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_optimizer_adamw(td_adamw by_value, const td_adamw *on_device, int64_t count, T *p, const G *g,
                       float *m, float *v, G *copy)
{
    __shared__ constants shared;

    if (threadIdx.x == 0)
        shared.set(on_device ? *on_device : by_value);
    __syncthreads();
    const constants k = shared;
    for_flat<W>(count, [&](auto width, int64_t index) {
        parameters<T, G, decltype(width)::value> some;
        some.get(index, p, g, m, v);
        some.step(k, index, p, m, v, copy);
    });
}

__global__ void td_optimizer_advance(td_adamw *adamw)
{
    adamw->step += 1;
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
    const unsigned blocks = flat_blocks((t->count - 1) / TURNS + 1, W, INT32_MAX);

    td_optimizer_adamw<T, G, W>
        <<<blocks, FLAT_BLOCK, 0, stream>>>(on_device ? td_adamw() : *adamw, on_device ? adamw : nullptr,
                                            t->count, (T *)t->p, (const G *)t->g, t->m, t->v, (G *)t->copy);
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
