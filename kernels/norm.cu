#include "kernels/norm.h"

#include "kernels/tile/flat.cuh"
#include "kernels/tile/launcher.cuh"
#include "kernels/tile/row.cuh"

namespace
{

using namespace tile;

/* As many blocks as run on 132 SMs at a time. Each writes its sum to `work`. */
constexpr int BLOCKS = 132 * 8;

using block = group<FLAT_BLOCK, 1>;

/* In float64 the square of an f32 is exact and does not overflow. */
template <typename T, int W>
__global__ void __launch_bounds__(FLAT_BLOCK) td_reduce_squares(int64_t count, const T *g, double *sums)
{
    __shared__ double scratch[32];
    double sum = 0.0;

    for_flat<W>(count, [&](auto width, int64_t index) {
        constexpr int N = decltype(width)::value;
        const pack<T, N> values = load<N>(g, index);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum += (double)values[i] * (double)values[i];
    });
    sum = reduce<block>(sum, add(), scratch);
    if (threadIdx.x == 0)
        sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(FLAT_BLOCK) td_reduce_norm(int blocks, const double *sums, float *norm)
{
    __shared__ double scratch[32];
    double sum = 0.0;

    for (int i = threadIdx.x; i < blocks; i += FLAT_BLOCK)
        sum += sums[i];
    sum = reduce<block>(sum, add(), scratch);
    if (threadIdx.x == 0)
        *norm = (float)sqrt(sum);
}

template <typename T, int W>
cudaError_t launch(cudaStream_t stream, int64_t count, const void *g, float *norm, void *work)
{
    const unsigned blocks = flat_blocks(count, W, BLOCKS);

    td_reduce_squares<T, W><<<blocks, FLAT_BLOCK, 0, stream>>>(count, (const T *)g, (double *)work);
    const cudaError_t code = cudaGetLastError();
    if (code != cudaSuccess)
        return code;
    td_reduce_norm<<<1, FLAT_BLOCK, 0, stream>>>((int)blocks, (const double *)work, norm);
    return cudaGetLastError();
}

} // namespace

size_t td_cuda_global_norm_work_bytes(void)
{
    return BLOCKS * sizeof(double);
}

LAUNCHER(td_global_norm, td_cuda_global_norm);

cudaError_t td_cuda_global_norm(cudaStream_t stream, int64_t count, td_dtype dtype, const void *g,
                                float *norm, void *work)
{
    return by_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::element;
        return packs_fit(1, count, g) ? launch<T, full_width<T>()>(stream, count, g, norm, work)
                                      : launch<T, 1>(stream, count, g, norm, work);
    });
}
