#include "kernels/heads.h"

#include "kernels/tile/elements.cuh"
#include "kernels/tile/launcher.cuh"

namespace
{

using namespace tile;

__global__ void td_elem_rope_table(int64_t count, int half, double theta, float *cosine, float *sine)
{
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (index >= count)
        return;
    const int64_t position = index / half, i = index % half;
    double s, c;
    sincos((double)position * pow(theta, -(double)i / (double)half), &s, &c);
    cosine[index] = (float)c;
    sine[index] = (float)s;
}

constexpr int BLOCK = 128, UNROLL = 4;

/* A token's row has PARTS sets of heads: q, k and v. The first TURNED of them are rotated. */
constexpr int PARTS = 3, TURNED = 2;

template <typename T> struct split_heads {
    T *q, *k, *v;

    __device__ T *of_part(int part) const
    {
        return part == 0 ? q : part == 1 ? k : v;
    }
};

/* The angles of a pack's pairs. They are loaded together with the packs, so that both loads overlap. */
template <int W> struct angles {
    pack<float, W / 2> cosine, sine;

    __device__ void take(const float *cosines, const float *sines, int64_t first)
    {
        cosine = load<W / 2>(cosines + first, 0);
        sine = load<W / 2>(sines + first, 0);
    }

    /* The pack rotated by the angles; with sign -1 rotated back. */
    template <typename T> __device__ pack<T, W> turn(const pack<T, W> &x, float sign) const
    {
        float result[W];

#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            const float even = x[2 * i], odd = x[2 * i + 1], s = sign * sine[i];
            result[2 * i] = even * cosine[i] - odd * s;
            result[2 * i + 1] = even * s + odd * cosine[i];
        }
        return rounded<T>(result);
    }
};

/* Both directions write whole cache lines and gather pieces of head_dim elements. A block of the split writes
 * UNROLL * BLOCK neighbouring packs of one head. All heads of a sequence run at about the same time, so that
 * reads and writes use each open DRAM page completely. */
template <typename T, int W>
__global__ void __launch_bounds__(BLOCK)
    td_elem_qkv_split(td_heads_shape s, const T *packed, const float *cosine, const float *sine,
                      split_heads<T> split)
{
    const int head_packs = (int)s.head_dim / W, count = (int)s.seq * head_packs, sets = (int)s.heads * PARTS;

    for (int64_t b = blockIdx.z; b < s.batch; b += gridDim.z)
        for (int set = blockIdx.y; set < sets; set += gridDim.y) {
            const int part = set / (int)s.heads, head = set % (int)s.heads;
            T *alone = split.of_part(part) + (b * s.heads + head) * s.seq * s.head_dim;
            const T *row = packed + b * s.seq * s.pitch + (int64_t)set * s.head_dim;
            pack<T, W> packs[UNROLL];
            angles<W> by[UNROLL];

#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const int index = (blockIdx.x * UNROLL + u) * BLOCK + threadIdx.x;
                const int token = index / head_packs, offset = index % head_packs * W;
                if (index < count)
                    packs[u] = load<W>(row + token * s.pitch + offset, 0);
                if (index < count && part < TURNED)
                    by[u].take(cosine, sine, (token * s.head_dim + offset) / 2);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                const int index = (blockIdx.x * UNROLL + u) * BLOCK + threadIdx.x;
                if (index >= count)
                    break;
                store(alone, index, part < TURNED ? by[u].turn(packs[u], 1.0f) : packs[u]);
            }
        }
}

/* A block of the merge writes UNROLL * BLOCK neighbouring packs of the packed rows. */
template <typename T, int W>
__global__ void __launch_bounds__(BLOCK) td_elem_qkv_merge(td_heads_shape s, T *packed, const float *cosine,
                                                           const float *sine, split_heads<T> split)
{
    const uint32_t head_packs = (uint32_t)s.head_dim / W, heads = (uint32_t)s.heads, seq = (uint32_t)s.seq;
    const uint32_t row_packs = head_packs * heads * PARTS, count = row_packs * seq * (uint32_t)s.batch;
    const uint32_t begin = blockIdx.x * (UNROLL * BLOCK) + threadIdx.x;
    pack<T, W> packs[UNROLL];
    angles<W> by[UNROLL];
    int64_t places[UNROLL];
    bool turns[UNROLL];

#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        const uint32_t index = begin + u * BLOCK;
        const uint32_t token = index / row_packs, in_row = index % row_packs;
        const uint32_t set = in_row / head_packs, offset = in_row % head_packs;
        const uint32_t part = set / heads, head = set % heads, b = token / seq, place = token % seq;
        if (index < count)
            packs[u] = load<W>(split.of_part(part),
                               ((int64_t)(b * heads + head) * seq + place) * head_packs + offset);
        places[u] = token * s.pitch + in_row * W;
        turns[u] = index < count && part < TURNED;
        if (turns[u])
            by[u].take(cosine, sine, ((int64_t)place * s.head_dim + offset * W) / 2);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        if (begin + u * BLOCK >= count)
            break;
        store(packed + places[u], 0, turns[u] ? by[u].turn(packs[u], -1.0f) : packs[u]);
    }
}

/* Pair by pair: for rows that do not begin at multiples of 16 bytes, and for tensors too large for 32-bit
 * indices. */
template <typename T, bool SPLIT>
__global__ void __launch_bounds__(BLOCK) td_elem_qkv_plain(td_heads_shape s, T *packed, const float *cosine,
                                                           const float *sine, split_heads<T> split)
{
    const int64_t pairs = s.head_dim / 2, all = s.batch * PARTS * s.heads * s.seq * pairs;

    for (int64_t index = (int64_t)blockIdx.x * BLOCK + threadIdx.x; index < all;
         index += (int64_t)gridDim.x * BLOCK) {
        const int64_t pair = index % pairs, token = index / pairs % s.seq, matrix = index / pairs / s.seq;
        const int64_t set = matrix % (PARTS * s.heads), b = matrix / (PARTS * s.heads);
        const int part = (int)(set / s.heads);
        T *alone =
            split.of_part(part) + ((b * s.heads + set % s.heads) * s.seq + token) * s.head_dim + 2 * pair;
        T *row = packed + (b * s.seq + token) * s.pitch + set * s.head_dim + 2 * pair;
        const T *from = SPLIT ? row : alone;
        T *to = SPLIT ? alone : row;
        T even = from[0], odd = from[1];

        if (part < TURNED) {
            const float c = cosine[token * pairs + pair],
                        turn = (SPLIT ? 1.0f : -1.0f) * sine[token * pairs + pair];
            const float x = widen(even), y = widen(odd);
            even = narrow<T>(x * c - y * turn);
            odd = narrow<T>(x * turn + y * c);
        }
        to[0] = even;
        to[1] = odd;
    }
}

template <bool SPLIT>
cudaError_t launch(cudaStream_t stream, const td_heads_shape *shape, const void *packed, const float *cosine,
                   const float *sine, const void *q, const void *k, const void *v)
{
    return by_dtype(shape->dtype, [&](auto dtype) {
        using T = typename decltype(dtype)::element;
        constexpr int W = full_width<T>();
        const split_heads<T> heads = {(T *)q, (T *)k, (T *)v};
        const int64_t sets = PARTS * shape->heads, packs = shape->seq * shape->head_dim / W;
        if (packs_fit(W, shape->head_dim, packed, q, k, v, cosine, sine) && shape->pitch % W == 0 &&
            shape->batch * sets * packs < (1 << 30)) {
            if constexpr (SPLIT) {
                const dim3 grid((unsigned)((packs - 1) / (UNROLL * BLOCK) + 1),
                                (unsigned)(sets < 65535 ? sets : 65535),
                                (unsigned)(shape->batch < 65535 ? shape->batch : 65535));
                td_elem_qkv_split<T, W>
                    <<<grid, BLOCK, 0, stream>>>(*shape, (const T *)packed, cosine, sine, heads);
            } else {
                const unsigned blocks = (unsigned)((shape->batch * sets * packs - 1) / (UNROLL * BLOCK) + 1);
                td_elem_qkv_merge<T, W>
                    <<<blocks, BLOCK, 0, stream>>>(*shape, (T *)packed, cosine, sine, heads);
            }
        } else {
            const int64_t blocks = (shape->batch * sets * shape->seq * (shape->head_dim / 2) - 1) / BLOCK + 1;
            td_elem_qkv_plain<T, SPLIT>
                <<<(unsigned)(blocks < (1 << 20) ? blocks : 1 << 20), BLOCK, 0, stream>>>(
                    *shape, (T *)packed, cosine, sine, heads);
        }
        return cudaGetLastError();
    });
}

} // namespace

cudaError_t td_cuda_rope_table(cudaStream_t stream, int64_t positions, int64_t head_dim, double theta,
                               float *cos, float *sin)
{
    const int64_t count = positions * (head_dim / 2);

    td_elem_rope_table<<<(unsigned)((count - 1) / 256 + 1), 256, 0, stream>>>(count, (int)(head_dim / 2),
                                                                              theta, cos, sin);
    return cudaGetLastError();
}

LAUNCHER(td_qkv_split_forward, td_cuda_qkv_split_forward);
LAUNCHER(td_qkv_split_backward, td_cuda_qkv_split_backward);

cudaError_t td_cuda_qkv_split_forward(cudaStream_t stream, const td_heads_shape *shape, const void *qkv,
                                      const float *cos, const float *sin, void *q, void *k, void *v)
{
    return launch<true>(stream, shape, qkv, cos, sin, q, k, v);
}

cudaError_t td_cuda_qkv_split_backward(cudaStream_t stream, const td_heads_shape *shape, const void *dq,
                                       const void *dk, const void *dv, const float *cos, const float *sin,
                                       void *dqkv)
{
    return launch<false>(stream, shape, dqkv, cos, sin, dq, dk, dv);
}
