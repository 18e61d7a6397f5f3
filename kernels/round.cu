#include "kernels/tile/flat.cuh"
#include "kernels/tile/launcher.cuh"

namespace
{

using namespace tile;

constexpr int BLOCK = 256;

template <typename From, typename To, int W>
__global__ void __launch_bounds__(BLOCK) td_elem_round(int64_t packs, const From *src, To *dst)
{
    for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < packs; i += (int64_t)gridDim.x * BLOCK) {
        const pack<From, W> value = load<W>(src, i);
        float wide[W];
        for (int j = 0; j < W; j++)
            wide[j] = value[j];
        store(dst, i, rounded<To>(wide));
    }
}

template <typename From, typename To, int W>
cudaError_t launch(cudaStream_t stream, int64_t count, const From *src, To *dst)
{
    const int64_t packs = count / W, blocks = (packs - 1) / BLOCK + 1;

    td_elem_round<From, To, W>
        <<<(unsigned)(blocks < 65536 ? blocks : 65536), BLOCK, 0, stream>>>(packs, src, dst);
    return cudaGetLastError();
}

template <int W, typename From, typename To>
__global__ void __launch_bounds__(FLAT_BLOCK)
    td_elem_planes(int64_t count, numbers<From> src, numbers<To> dst)
{
    for_flat<W>(count, [&](auto width, int64_t index) {
        constexpr int N = decltype(width)::value;
        const auto held = src.template load<N>(index);
        float values[N];
#pragma unroll
        for (int i = 0; i < N; i++)
            values[i] = held[i];
        dst.store(index, values);
    });
}

template <int W, typename From, typename To>
cudaError_t launch_planes(cudaStream_t stream, int64_t count, numbers<From> src, numbers<To> dst)
{
    td_elem_planes<W><<<flat_blocks(count, W, 65536), FLAT_BLOCK, 0, stream>>>(count, src, dst);
    return cudaGetLastError();
}

} // namespace

LAUNCHER(td_round, td_cuda_round);
LAUNCHER(td_split, td_cuda_split);
LAUNCHER(td_join, td_cuda_join);

cudaError_t td_cuda_round(cudaStream_t stream, int64_t count, td_dtype src_dtype, const void *src,
                          td_dtype dst_dtype, void *dst)
{
    return by_dtype(src_dtype, [&](auto from) {
        return by_dtype(dst_dtype, [&](auto to) {
            using From = typename decltype(from)::element;
            using To = typename decltype(to)::element;
            constexpr int W = full_width<From, To>();
            const From *in = static_cast<const From *>(src);
            To *out = static_cast<To *>(dst);
            return packs_fit(W, count, in, out) ? launch<From, To, W>(stream, count, in, out)
                                                : launch<From, To, 1>(stream, count, in, out);
        });
    });
}

cudaError_t td_cuda_split(cudaStream_t stream, int64_t count, const float *src, void *high, void *low)
{
    const numbers<float> from((float *)src, nullptr);
    const numbers<planes> to(high, low);

    return packs_fit(1, count, src, high, low) ? launch_planes<8>(stream, count, from, to)
                                               : launch_planes<1>(stream, count, from, to);
}

cudaError_t td_cuda_join(cudaStream_t stream, int64_t count, const void *high, const void *low, float *dst)
{
    const numbers<planes> from((void *)high, (void *)low);
    const numbers<float> to(dst, nullptr);

    return packs_fit(1, count, high, low, dst) ? launch_planes<8>(stream, count, from, to)
                                               : launch_planes<1>(stream, count, from, to);
}
