#include "kernels/tile/flat.cuh"
#include "kernels/tile/launcher.cuh"

namespace
{

using namespace tile;

template <typename T, int W>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_elem_residual_add(int64_t count, const T *a, const T *b, T *y)
{
    for_flat<W>(count, [&](auto width, int64_t index) {
        constexpr int N = decltype(width)::value;
        const pack<T, N> left = load<N>(a, index), right = load<N>(b, index);
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] = left[i] + right[i];
        store(y, index, rounded<T>(sum));
    });
}

template <typename T, int W>
cudaError_t launch(cudaStream_t stream, int64_t count, const void *a, const void *b, void *y)
{
    td_elem_residual_add<T, W><<<flat_blocks(count, W, 1 << 24), FLAT_BLOCK, 0, stream>>>(
        count, (const T *)a, (const T *)b, (T *)y);
    return cudaGetLastError();
}

} // namespace

LAUNCHER(td_residual_add, td_cuda_residual_add);

cudaError_t td_cuda_residual_add(cudaStream_t stream, int64_t count, td_dtype dtype, const void *a,
                                 const void *b, void *y)
{
    return by_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::element;
        return packs_fit(1, count, a, b, y) ? launch<T, full_width<T>()>(stream, count, a, b, y)
                                            : launch<T, 1>(stream, count, a, b, y);
    });
}
