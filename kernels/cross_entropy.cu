#include "kernels/cross_entropy.h"

#include "kernels/tile/dependent.cuh"
#include "kernels/tile/softmax.cuh"

namespace
{

using namespace tile;

/* Blocks that should fit on an SM, which has 64 Ki registers. Some blocks compute while others wait for
 * memory. With more blocks, the pieces of their rows would evict each other from the L2 cache before the
 * second read. */
template <typename G> constexpr int RESIDENT = (G::WHOLE && G::HELD <= 5 ? 1536 : 1024) / G::BLOCK;

/* A block has a row. Without dlogits, most of the time goes into reading the row. Times of this kernel and of
 * a loop that only reads, for 2,048 rows of 10,000 in bf16 (H200, 22 November 2026):
 *
 *   18.1 and 17.5 us   after a write of 256 MB, whose dirty lines the L2 cache must write back
 *   14.9 and 13.4 us   after a read of 256 MB
 *
 * A copy of the next row to shared memory, or its prefetch, took 18.4 to 25 us after the write.
 *
 * loss[r] = top - logit + log(sum) in float64. lse - logit would lose the small loss of a confident row in
 * the rounding of lse. A target outside the vocabulary makes the loss and the row of dlogits NaN. */
template <typename T, int W, typename G>
__global__ void __launch_bounds__(G::BLOCK, RESIDENT<G>)
    td_softmax_cross_entropy(int vocab, const T *logits, const int64_t *targets, float scale, double *loss,
                             float *lse, T *dlogits)
{
    __shared__ running<T> scratch[32];
    const int64_t r = blockIdx.x, wanted = targets[r];
    const int packs = vocab / W;
    row<T, W, G> in;
    running<T> all;

    launch_dependents();
    for_pieces<G>(packs, [&](int first, int count) {
        in.take(logits + (r * vocab + (int64_t)first * W), count);
        all = all + sum_piece<T, W, G>(in, count);
    });
    /* This load comes after the loads above, because they would wait for it. It comes before the barrier in
     * reduce, because after the barrier other threads may overwrite the row. */
    const int target = wanted >= 0 && wanted < vocab ? (int)wanted : -1;
    const float of_target = target >= 0 ? widen(logits[r * vocab + target]) : NAN;
    all = reduce<G>(all, add(), scratch);
    if (all.top == -INFINITY) /* all logits are -infinity: there are no probabilities */
        all.sum = NAN;
    if (threadIdx.x == 0) {
        const double log_sum = log((double)all.sum);
        if (lse)
            lse[r] = (float)((double)all.top + log_sum);
        if (loss)
            loss[r] = (double)all.top - (double)of_target + log_sum;
    }
    if (!dlogits)
        return;
    /* The row's sum is used, not lse: the rounding of lse to f32 would change every probability. */
    const float factor = target >= 0 ? scale / all.sum : NAN;
    for_pieces<G>(packs, [&](int first, int count) {
        if (!G::WHOLE)
            in.take(logits + (r * vocab + (int64_t)first * W), count);
        for_packs<G>(count, [&](int slot, int index) {
            float result[W];
#pragma unroll
            for (int i = 0; i < W; i++)
                result[i] = factor * exp_for<T>(in.packs[slot][i] - all.top);
            store(dlogits + (r * vocab + (int64_t)first * W), index, rounded<T>(result));
        });
    });
    /* The element of the target is probability - 1. It is computed in float64, because the difference may be
     * small. The thread that wrote this pack above writes the element. */
    if (target >= 0 && target / W % G::THREADS == G::thread()) {
        const double share = exp((double)of_target - (double)all.top) / (double)all.sum;
        dlogits[r * vocab + target] = narrow<T>((float)(scale * (share - 1.0)));
    }
}

__global__ void __launch_bounds__(1024) td_reduce_loss(int64_t rows, const double *losses, float *loss)
{
    __shared__ double scratch[32];
    double sum = 0.0;

    wait_for_primary();
#pragma unroll 4
    for (int64_t r = threadIdx.x; r < rows; r += 1024)
        sum += losses[r];
    sum = reduce<group<1024, 1>>(sum, add(), scratch);
    if (threadIdx.x == 0)
        *loss = (float)(sum / (double)rows);
}

/* Calls f with the packs' width and the group. The course's vocabulary of 10,000 is 1,250 packs of 16-bit
 * elements, or 2,500 of f32. 2,048 f32 rows take 25.7 us forward and 43.5 backward. With 512 threads of 5
 * packs they took 34.9 and 47.4 (H200, 21 November 2026). */
template <typename T, typename F>
cudaError_t by_shape(int64_t vocab, const void *logits, const void *dlogits, F f)
{
    constexpr auto wide = std::integral_constant<int, full_width<T>()>();
    constexpr auto one = std::integral_constant<int, 1>();

    if (!packs_fit(wide, vocab, logits, dlogits))
        return f(one, group<256, 8, 1, false>());
    const int64_t packs = vocab / wide;
    if (packs <= 256)
        return f(wide, group<128, 2>());
    if (packs <= 1280)
        return f(wide, group<256, 5>());
    return packs <= 2560 ? f(wide, group<256, 10>()) : f(wide, group<512, 4, 1, false>());
}

} // namespace

size_t td_cuda_cross_entropy_work_bytes(const td_cross_entropy_shape *shape)
{
    return (size_t)shape->rows * sizeof(double);
}

cudaError_t td_cuda_cross_entropy(cudaStream_t stream, const td_cross_entropy_shape *shape,
                                  const void *logits, const int64_t *targets, float scale, float *loss,
                                  float *lse, void *dlogits, void *work)
{
    const float share = (float)((double)scale / (double)shape->rows);
    double *losses = loss ? (double *)work : nullptr;

    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        return by_shape<T>(shape->vocab, logits, dlogits, [&](auto width, auto group) {
            using G = decltype(group);
            td_softmax_cross_entropy<T, decltype(width)::value, G>
                <<<(unsigned)shape->rows, G::BLOCK, 0, stream>>>((int)shape->vocab, (const T *)logits,
                                                                 targets, share, losses, lse, (T *)dlogits);
            const cudaError_t code = cudaGetLastError();
            return code == cudaSuccess && loss
                       ? launch_dependent(stream, 1, 1024, td_reduce_loss, shape->rows, losses, loss)
                       : code;
        });
    });
}
