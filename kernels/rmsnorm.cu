#include "kernels/rmsnorm.h"

#include "kernels/tile/dependent.cuh"
#include "kernels/tile/row.cuh"

namespace
{

using namespace tile;

/* X is the type of x, weight, sum and dx; T is the type of other tensors. ADD: x and b are added first. */
template <typename T, typename X, int W, typename G, bool ADD>
__global__ void __launch_bounds__(G::BLOCK, 1)
    td_norm_rmsnorm_forward(int64_t rows, int cols, float eps, const X *x, const T *b, const X *weight,
                            X *sum, T *y, float *rstd_out)
{
    __shared__ float scratch[32];
    const int64_t r = (int64_t)blockIdx.x * G::ROWS + G::row();
    const int packs = cols / W;
    row<X, W, G> in;
    float squares = 0.0f;

    if (r >= rows) /* whole warps end: a block has several rows only if each row has a warp */
        return;
    for_pieces<G>(packs, [&](int first, int count) {
        const int64_t at = r * cols + (int64_t)first * W;
        in.take(x + at, count);
        if constexpr (ADD) {
            row<T, W, G> more;
            more.take(b + at, count);
            for_packs<G>(count, [&](int slot, int index) {
                float total[W];
#pragma unroll
                for (int i = 0; i < W; i++)
                    total[i] = in.packs[slot][i] + more.packs[slot][i];
                in.packs[slot] = rounded<X>(total);
                store(sum + at, index, in.packs[slot]);
            });
        }
        for_packs<G>(count, [&](int slot, int) {
#pragma unroll
            for (int i = 0; i < W; i++)
                squares += in.packs[slot][i] * in.packs[slot][i];
        });
    });
    const float rstd = 1.0f / sqrtf(reduce<G>(squares, add(), scratch) / (float)cols + eps);
    if (rstd_out && G::thread() == 0)
        rstd_out[r] = rstd;
    for_pieces<G>(packs, [&](int first, int count) {
        const int64_t at = r * cols + (int64_t)first * W;
        if (!G::WHOLE)
            in.take((ADD ? sum : x) + at, count);
        for_packs<G>(count, [&](int slot, int index) {
            const pack<X, W> scale = load<W>(weight, first + index);
            float result[W];
#pragma unroll
            for (int i = 0; i < W; i++)
                result[i] = in.packs[slot][i] * rstd * scale[i];
            store(y + at, index, rounded<T>(result));
        });
    });
}

/* dweight sums over all rows. Each group of threads sums its rows in registers. Each block sums its groups in
 * shared memory, into its row of `work`. td_reduce_dweight adds up these rows. The number of blocks, and so
 * the order of the sums, depends on the shape alone. Two blocks fit on each of the 132 SMs of an H100. */
constexpr int BLOCKS = 264;

/* The fewest blocks that need no more turns than BLOCKS blocks. More blocks would only add rows to sum up. */
inline int blocks_of(int64_t rows, int rows_of_block)
{
    const int64_t needed = (rows - 1) / rows_of_block + 1, turns = (needed - 1) / BLOCKS + 1;

    return (int)((needed - 1) / turns + 1);
}

/* Starts the copy of a pack to shared memory. */
template <int W, typename T> __device__ inline void fetch(pack<T, W> *to, const T *array, int64_t index)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    const T *from = array + index * W;

    if constexpr (sizeof(pack<T, W>) == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from),
                     "n"(sizeof(pack<T, W>))
                     : "memory");
}

/* While a group computes one row, its next row is copied to shared memory. Each thread reads only packs that
 * it copied itself, so no thread waits for another. All groups of a block take their rows in step, because
 * `reduce` has barriers of the block. A thread has the same columns in every row, so its weights stay in
 * registers.
 *
 * 2,048 rows of 2,560 in bf16 take 14.4 us, and 16.9 with td_reduce_dweight. Copies of as many bytes take
 * 11.9 us. Other variants of both kernels (H200, 22 November 2026):
 *
 *   17.3 us            two rows are copied in advance
 *   16.5 to 16.8 us    groups of 160 threads with separate barriers
 *   15.7 us            these groups, and one barrier of the grid in place of the second kernel; this needs a
 *                      cooperative launch */
template <typename T, typename X, int W, typename G>
__global__ void __launch_bounds__(G::BLOCK, 2)
    td_norm_rmsnorm_backward(int64_t rows, int cols, const X *x, const X *weight, const float *rstd,
                             const T *dy, bool accumulate, X *dx, T *dx_rounded, float *partial)
{
    constexpr int SIZE = G::HELD * G::BLOCK;
    __shared__ float scratch[2][32];
    extern __shared__ uint4 shared[];
    pack<X, W> *const all_x = (pack<X, W> *)shared; /* [2][HELD][BLOCK], as all_dx and all_dy */
    pack<X, W> *const all_dx = all_x + 2 * SIZE;
    pack<T, W> *const all_dy = (pack<T, W> *)(all_dx + 2 * SIZE);
    const int packs = cols / W;
    const int64_t first = (int64_t)blockIdx.x * G::ROWS + G::row(), step = (int64_t)gridDim.x * G::ROWS;
    row<X, W, G> scales;
    float sums[G::HELD][W] = {};
    float next_rstd = first < rows ? rstd[first] : 0.0f;
    int turn = 0;

    const auto fetch_row = [&](int64_t r, int to) {
        if (r < rows)
            for_packs<G>(packs, [&](int slot, int index) {
                const int at = to * SIZE + slot * G::BLOCK + threadIdx.x;
                fetch<W>(all_x + at, x + r * cols, index);
                fetch<W>(all_dy + at, dy + r * cols, index);
                if (accumulate)
                    fetch<W>(all_dx + at, dx + r * cols, index);
            });
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

    fetch_row(first, 0);
    scales.take(weight, packs);
    for (int64_t r = first; r - G::row() < rows; r += step) {
        const int count = r < rows ? packs : 0;
        const X *const mine_x = (const X *)(all_x + turn * SIZE + threadIdx.x);
        const X *const mine_dx = (const X *)(all_dx + turn * SIZE + threadIdx.x);
        const T *const mine_dy = (const T *)(all_dy + turn * SIZE + threadIdx.x);
        const float scale = next_rstd;
        row<X, W, G> values;
        row<T, W, G> grads;
        float dot = 0.0f;

        fetch_row(r + step, 1 - turn);
        if (r + step < rows)
            next_rstd = rstd[r + step];
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        for_packs<G>(count, [&](int slot, int) {
            const pack<X, W> value = load<W>(mine_x, slot * G::BLOCK);
            const pack<T, W> g = load<W>(mine_dy, slot * G::BLOCK);
#pragma unroll
            for (int i = 0; i < W; i++)
                dot += g[i] * scales.packs[slot][i] * value[i];
            values.packs[slot] = value;
            grads.packs[slot] = g;
        });
        const float mean = reduce<G>(dot, add(), scratch[turn]) * scale * scale / (float)cols;
        for_packs<G>(count, [&](int slot, int index) {
            const pack<X, W> value = values.packs[slot];
            const pack<T, W> g = grads.packs[slot];
            pack<X, W> before = {};
            float result[W];
            if (accumulate)
                before = load<W>(mine_dx, slot * G::BLOCK);
#pragma unroll
            for (int i = 0; i < W; i++) {
                result[i] = before[i] + scale * (g[i] * scales.packs[slot][i] - value[i] * mean);
                sums[slot][i] += g[i] * (value[i] * scale);
            }
            store(dx + r * cols, index, rounded<X>(result));
            if (dx_rounded)
                store(dx_rounded + r * cols, index, rounded<T>(result));
        });
        turn = 1 - turn;
    }

    /* launch_dependents at the start of the kernel, with secondary blocks of half the size so that both
     * kernels fit, was slower: 2,560 columns of bf16 and f32 took 25.4 us instead of 24.2 (H200, 21 November
     * 2026). */
    launch_dependents();
    /* The upper half of the groups adds its sums to the lower half, through the rows' shared memory. This
     * repeats with half as many groups. */
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int half = G::ROWS / 2; half > 0; half /= 2) {
        const bool gives = G::row() >= half && G::row() < 2 * half;
        float *between =
            (float *)shared + threadIdx.x - (gives ? half * G::THREADS : 0); /* [HELD * W][BLOCK / 2] */
        __syncthreads();
        if (gives)
#pragma unroll
            for (int n = 0; n < G::HELD * W; n++)
                between[n * (G::BLOCK / 2)] = sums[n / W][n % W];
        __syncthreads();
        if (G::row() < half)
#pragma unroll
            for (int n = 0; n < G::HELD * W; n++)
                sums[n / W][n % W] += between[n * (G::BLOCK / 2)];
    }
    if (G::row() == 0)
        for_packs<G>(packs, [&](int slot, int index) {
            pack<float, W> total;
#pragma unroll
            for (int i = 0; i < W; i++)
                total.at[i] = sums[slot][i];
            store(partial + (int64_t)blockIdx.x * cols, index, total);
        });
}

/* For longer rows, and for rows that do not begin at multiples of 16 bytes: element by element, with the sums
 * of dweight in GPU memory. */
template <typename T, typename X>
__global__ void __launch_bounds__(256)
    td_norm_rmsnorm_backward_plain(int64_t rows, int cols, const X *x, const X *weight, const float *rstd,
                                   const T *dy, bool accumulate, X *dx, T *dx_rounded, float *partial)
{
    using G = group<256, 1>;
    __shared__ float scratch[2][32];
    int turn = 0;

    partial += (int64_t)blockIdx.x * cols;
    for (int i = threadIdx.x; i < cols; i += G::BLOCK)
        partial[i] = 0.0f;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const int64_t start = r * cols;
        const float scale = rstd[r];
        float dot = 0.0f;

        for (int i = threadIdx.x; i < cols; i += G::BLOCK)
            dot += widen(dy[start + i]) * widen(weight[i]) * widen(x[start + i]);
        const float mean = reduce<G>(dot, add(), scratch[turn]) * scale * scale / (float)cols;
        turn = 1 - turn;
        for (int i = threadIdx.x; i < cols; i += G::BLOCK) {
            const float g = widen(dy[start + i]), value = widen(x[start + i]);
            const float before = accumulate ? widen(dx[start + i]) : 0.0f;
            const float result = before + scale * (g * widen(weight[i]) - value * mean);
            dx[start + i] = narrow<X>(result);
            if (dx_rounded)
                dx_rounded[start + i] = narrow<T>(result);
            partial[i] += g * (value * scale);
        }
    }
}

/* A block sums 32 neighbouring columns, one for each lane. Its 32 warps take the rows of `partial` in turns,
 * and all their loads are in flight together. */
template <typename T>
__global__ void __launch_bounds__(1024)
    td_reduce_dweight(int parts, int cols, const float *partial, bool accumulate, T *dweight)
{
    constexpr int TURNS = (BLOCKS - 1) / 32 + 1;
    __shared__ double sums[32][33];
    const int lane = threadIdx.x, warp = threadIdx.y, col = blockIdx.x * 32 + lane;
    const int mine = blockIdx.x * 32 + warp;
    float values[TURNS];
    double sum = 0.0;

    wait_for_primary();
    const bool writes = lane == 0 && mine < cols;
    const double before = writes && accumulate ? (double)widen(dweight[mine]) : 0.0;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int part = warp + 32 * turn;
        values[turn] = part < parts && col < cols ? partial[(int64_t)part * cols + col] : 0.0f;
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
        sum += (double)values[turn];
    sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[lane][warp];
    for (int distance = 16; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (writes)
        dweight[mine] = narrow<T>((float)(before + sum));
}

/* Calls f with the packs' width, as std::integral_constant, and the group. */
template <typename T, typename X, typename F, typename... P>
cudaError_t by_forward_shape(int64_t cols, F f, const P *...pointers)
{
    constexpr auto wide = std::integral_constant<int, full_width<T, X>()>();

    if (!packs_fit(wide, cols, pointers...))
        return by_plain_group(cols, [&](auto group) { return f(std::integral_constant<int, 1>(), group); });
    /* 2,048 rows of 320 packs of 16-bit elements take 7.0 us; four packs to a thread took 8.3. 400 packs of
     * f32 take 7.4 us, before 8.2 (H200, 21 November 2026). */
    if (cols / wide > 256 && cols / wide <= 384)
        return f(wide, group<128, 3>());
    if (cols / wide > 384 && cols / wide <= 512)
        return f(wide, group<256, 2>());
    return by_group(cols / wide, [&](auto group) { return f(wide, group); });
}

template <typename T, typename X>
cudaError_t backward(cudaStream_t stream, const td_rmsnorm_shape *shape, const X *x, const X *weight,
                     const float *rstd, const T *dy, bool accumulate_dx, X *dx, T *dx_rounded,
                     bool accumulate_dweight, void *dweight, float *partial)
{
    constexpr int W = full_width<T, X>();
    const int cols = (int)shape->cols;
    const int64_t packs = cols / W;
    int blocks = 0;

    const auto launch = [&](auto group) {
        using G = decltype(group);
        const auto kernel = td_norm_rmsnorm_backward<T, X, W, G>;
        const size_t shared = 2 * G::HELD * G::BLOCK * (2 * sizeof(pack<X, W>) + sizeof(pack<T, W>));
        const cudaError_t code =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);

        blocks = blocks_of(shape->rows, G::ROWS);
        if (code == cudaSuccess)
            kernel<<<blocks, G::BLOCK, shared, stream>>>(shape->rows, cols, x, weight, rstd, dy,
                                                         accumulate_dx, dx, dx_rounded, partial);
        return code == cudaSuccess ? cudaGetLastError() : code;
    };
    cudaError_t code;
    if (!packs_fit(W, cols, x, weight, dy, dx, dx_rounded, partial) || packs > 1024) {
        blocks = blocks_of(shape->rows, 1);
        td_norm_rmsnorm_backward_plain<T, X><<<blocks, 256, 0, stream>>>(
            shape->rows, cols, x, weight, rstd, dy, accumulate_dx, dx, dx_rounded, partial);
        code = cudaGetLastError();
    } else if (packs <= 32) {
        code = launch(group<32, 1, 16>());
    } else if (packs <= 128) {
        code = launch(group<64, 2, 4>());
    } else if (packs <= 256) {
        code = launch(group<128, 2, 2>());
    } else if (packs <= 512) {
        code = launch(group<256, 2, 1>());
    } else {
        code = launch(group<256, 4, 1>());
    }
    if (code != cudaSuccess)
        return code;
    const auto reduce = [&](auto *to) {
        return launch_dependent(stream, (cols - 1) / 32 + 1, dim3(32, 32),
                                td_reduce_dweight<std::remove_pointer_t<decltype(to)>>, blocks, cols, partial,
                                accumulate_dweight, to);
    };
    return shape->dweight_dtype == TD_F32 ? reduce((float *)dweight) : reduce((T *)dweight);
}

} // namespace

cudaError_t td_cuda_rmsnorm_forward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                    const void *b, const void *weight, void *sum, void *y, float *rstd)
{
    return by_dtype_and_wide(shape->dtype, shape->x_dtype, [&](auto dtype, auto x_dtype) {
        using T = typename decltype(dtype)::element;
        using X = typename decltype(x_dtype)::element;
        return by_forward_shape<T, X>(
            shape->cols,
            [&](auto width, auto group) {
                using G = decltype(group);
                constexpr int W = decltype(width)::value;
                const unsigned blocks = (unsigned)((shape->rows - 1) / G::ROWS + 1);
                if (b)
                    td_norm_rmsnorm_forward<T, X, W, G, true><<<blocks, G::BLOCK, 0, stream>>>(
                        shape->rows, (int)shape->cols, shape->eps, (const X *)x, (const T *)b,
                        (const X *)weight, (X *)sum, (T *)y, rstd);
                else
                    td_norm_rmsnorm_forward<T, X, W, G, false><<<blocks, G::BLOCK, 0, stream>>>(
                        shape->rows, (int)shape->cols, shape->eps, (const X *)x, (const T *)b,
                        (const X *)weight, (X *)sum, (T *)y, rstd);
                return cudaGetLastError();
            },
            x, b, weight, sum, y);
    });
}

size_t td_cuda_rmsnorm_backward_work_bytes(const td_rmsnorm_shape *shape)
{
    return (size_t)blocks_of(shape->rows, 1) * shape->cols *
           sizeof(float); /* blocks of several rows are fewer */
}

cudaError_t td_cuda_rmsnorm_backward(cudaStream_t stream, const td_rmsnorm_shape *shape, const void *x,
                                     const void *weight, const float *rstd, const void *dy,
                                     bool accumulate_dx, void *dx, void *dx_rounded, bool accumulate_dweight,
                                     void *dweight, void *work)
{
    return by_dtype_and_wide(shape->dtype, shape->x_dtype, [&](auto dtype, auto x_dtype) {
        using T = typename decltype(dtype)::element;
        using X = typename decltype(x_dtype)::element;
        return backward(stream, shape, (const X *)x, (const X *)weight, rstd, (const T *)dy, accumulate_dx,
                        (X *)dx, (T *)dx_rounded, accumulate_dweight, dweight, (float *)work);
    });
}
