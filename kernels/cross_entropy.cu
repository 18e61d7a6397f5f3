#include "kernels/cross_entropy.h"

#include "kernels/tile/behind.cuh"
#include "kernels/tile/softmax.cuh"

namespace
{

using namespace tile;

/* Blocks that should fit on a multiprocessor, which has 64 Ki registers: some compute while others wait for
 * memory. More of a row's pieces at a time would push each other out of the second-level cache before they
 * are read again. */
template <typename G> constexpr int RESIDENT = (G::WHOLE && G::HELD <= 5 ? 1536 : 1024) / G::BLOCK;

/* A block has a row. Without dlogits reading it is what takes the time: 2,048 rows of 10,000 in bf16 take
 * 18.1 us where a loop that only reads them takes 17.5, both after a write of 256 MB, which has the cache
 * write back what they push out, and 14.9 and 13.4 after a read of as much. With the next row on its way to
 * shared memory, or prefetched, they take 18.4 to 25 after the write (H200, 22 November 2026).
 *
 * loss[r] = top - logit + log(sum) in float64: lse - logit would lose the loss of a confident row to the
 * rounding of lse. A target outside the vocabulary makes the loss and the row of dlogits NaN. */
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

    let_begin();
    for_pieces<G>(packs, [&](int first, int count) {
        in.take(logits + (r * vocab + (int64_t)first * W), count);
        all = all + sum_piece<T, W, G>(in, count);
    });
    /* After the loads above, which would wait for this one; before the barrier, behind which the row may be
     * written over. */
    const int target = wanted >= 0 && wanted < vocab ? (int)wanted : -1;
    const float of_target = target >= 0 ? widen(logits[r * vocab + target]) : NAN;
    all = reduce<G>(all, add(), scratch);
    if (all.top == -INFINITY) /* nothing has a share of nothing */
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
    /* The row's sum, not lse: rounded to f32, lse would put an error of its own on every probability. */
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
    /* The target's probability less one, without the others' rounding, by the thread that wrote the pack
     * around it. */
    if (target >= 0 && target / W % G::THREADS == G::thread()) {
        const double share = exp((double)of_target - (double)all.top) / (double)all.sum;
        dlogits[r * vocab + target] = narrow<T>((float)(scale * (share - 1.0)));
    }
}

__global__ void __launch_bounds__(1024) td_reduce_loss(int64_t rows, const double *losses, float *loss)
{
    __shared__ double scratch[32];
    double sum = 0.0;

    wait_for_first();
#pragma unroll 4
    for (int64_t r = threadIdx.x; r < rows; r += 1024)
        sum += losses[r];
    sum = reduce<group<1024, 1>>(sum, add(), scratch);
    if (threadIdx.x == 0)
        *loss = (float)(sum / (double)rows);
}

/* Calls f with the packs' width and the group: the course's vocabulary of 10,000 is 1,250 packs of 16 bits,
 * 2,500 of f32 (2,048 rows of those: forward 25.7 us and backward 43.5, where 512 threads of 5 packs took
 * 34.9 and 47.4; H200, 21 November 2026). */
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
                       ? launch_behind(stream, 1, 1024, td_reduce_loss, shape->rows, losses, loss)
                       : code;
        });
    });
}
