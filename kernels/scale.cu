#include "kernels/scale.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace
{

constexpr int BLOCK = 256, MOST_BLOCKS = 65536;

__device__ inline double scaled(double x, double factor)
{
    return x * factor;
}

__device__ inline float scaled(float x, float factor)
{
    return x * factor;
}

__device__ inline __half scaled(__half x, float factor)
{
    return __float2half_rn(__half2float(x) * factor);
}

__device__ inline __nv_bfloat16 scaled(__nv_bfloat16 x, float factor)
{
    return __float2bfloat16_rn(__bfloat162float(x) * factor);
}

template <typename T, typename F>
__global__ void __launch_bounds__(BLOCK) td_elem_scale(int64_t count, F factor, T *data)
{
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += (int64_t)gridDim.x * BLOCK)
        data[i] = scaled(data[i], factor);
}

template <typename T, typename F> cudaError_t launch(cudaStream_t stream, int64_t count, F factor, void *data)
{
    const int64_t blocks = (count - 1) / BLOCK + 1;

    td_elem_scale<<<(unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), BLOCK, 0, stream>>>(
        count, factor, static_cast<T *>(data));
    return cudaGetLastError();
}

} // namespace

cudaError_t td_cuda_scale(cudaStream_t stream, int64_t count, int numerator, int denominator, td_dtype dtype,
                          void *data)
{
    const float factor = (float)numerator / (float)denominator;

    switch (dtype) {
    case TD_F64:
        return launch<double>(stream, count, (double)numerator / denominator, data);
    case TD_F32:
        return launch<float>(stream, count, factor, data);
    case TD_F16:
        return launch<__half>(stream, count, factor, data);
    default:
        return launch<__nv_bfloat16>(stream, count, factor, data);
    }
}
