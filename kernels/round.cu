#include "kernels/round.h"

#include "kernels/tile/elements.cuh"

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

} // namespace

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
