/* dW = dy^T x on Hopper's tensor cores, and beside the products of the next tile the AdamW step on the last
 * one, whose gradient never leaves the multiprocessor. The step is bound by memory and the products by
 * arithmetic: together they take little longer than the longer of the two.
 *
 * A block has four warpgroups. Two multiply, 64 x 192 of the tile each, and leave their sums, rounded, in
 * shared memory. Of the other eight warps one has the copy engine bring dy and x, 32 tokens at a time, and
 * six take the sums and update the weights, reading memory ahead. Two blocks make a cluster, one tile above
 * the other: each brings half of x's tokens for both.
 *
 * Of w1 and w3 of 2.7B (H200, November 2026) the products alone take 320 us, their operands alone 277, the
 * updates alone 406, the latter two together 500 and all of it 490: the updates wait for what dy and x take
 * of the way from the cache. Tiles of 256 columns bring less (235 us), but their sums leave 96 registers to
 * the warps that update, which take 492 us; clusters of 2 x 2 bring less yet, but an H200 runs 30 of them at
 * a time, which leaves twelve multiprocessors idle (324 us); tiles of 64 x 384 bring more.
 *
 * A launch takes several layers, one after the other: when it begins there is nothing yet to update, and when
 * it ends nothing to multiply, and that is better paid for once. But in a long launch blocks drift apart: the
 * four products of 2.7B's layer take 985 us, and four such layers in one launch 1,118 each. With tiles handed
 * out by a counter, or with clusters that wait for each other at every first, second or fourth tile, they
 * take 1,035, and launches of one layer 1 to 2 % longer. */
#include "kernels/linear_adamw.h"

#include "kernels/tile/adamw.cuh"
#include "kernels/tile/hopper.cuh"

#include <cudaTypedefs.h>

namespace
{

using namespace tile;

constexpr int GROUP = 128, THREADS = 4 * GROUP; /* of a warpgroup, of a block */
constexpr int ROWS = 128, COLUMNS = 192, DEPTH = 32, STAGES = 8;
constexpr int HALF = ROWS / 2;               /* the rows of one multiplying warpgroup */
constexpr int CLUSTER = 2;                   /* blocks */
constexpr int PANEL = DEPTH * PANEL_COLUMNS; /* elements */
constexpr int DY_PANELS = ROWS / PANEL_COLUMNS, X_PANELS = COLUMNS / PANEL_COLUMNS;
constexpr int STAGE_PANELS = DY_PANELS + X_PANELS;
/* Unused where the code is not Hopper's: the kernel is empty there. */
[[maybe_unused]] constexpr uint32_t PANEL_BYTES = PANEL * 2, STAGE_BYTES = STAGE_PANELS * PANEL_BYTES;
/* Of the gradient's rows: eight of them, four words each, are in 32 banks. */
constexpr int PITCH = COLUMNS + 8;
[[maybe_unused]] constexpr int WARPS = GROUP / 32; /* of a multiplying warpgroup */
constexpr int UPDATERS = 6;                        /* warps that update */

template <typename T> struct alignas(1024) shared_memory {
    T stages[STAGES][STAGE_PANELS][PANEL];
    T grads[2][HALF * PITCH];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t grads_full[2], grads_empty[2];
};

template <typename P, typename T> struct layer {
    int64_t tokens, d_in, d_out;
    int begin;        /* the first of its pairs of tiles, which are a cluster's */
    int high, across; /* pairs */
    P *p;
    float *m, *v;
    T *copy; /* or NULL */
};

template <typename P, typename T> struct batch {
    CUtensorMap dy[TD_LINEAR_ADAMW_MOST], x[TD_LINEAR_ADAMW_MOST];
    layer<P, T> layers[TD_LINEAR_ADAMW_MOST];
    int count, end; /* layers, pairs of all */
};

/* The cluster's pairs of tiles, in an order that keeps those which run together close: they share dy and x in
 * the cache. */
template <typename P, typename T> struct tiles {
    static constexpr int GROUPED = 8;
    const batch<P, T> &all;
    int index, which = 0; /* of the pair, of its layer */

    __device__ explicit tiles(const batch<P, T> &b) : all(b), index((int)blockIdx.x / CLUSTER)
    {
        find();
    }

    __device__ void find()
    {
        while (which + 1 < all.count && index >= all.layers[which + 1].begin)
            which++;
    }

    __device__ bool more() const
    {
        return index < all.end;
    }

    __device__ void next()
    {
        index += (int)gridDim.x / CLUSTER;
        find();
    }

    __device__ const layer<P, T> &of() const
    {
        return all.layers[which];
    }

    __device__ void place(int64_t &row, int64_t &column) const
    {
        const int within = index - of().begin, first = within / (GROUPED * of().across) * GROUPED;
        const int high = min(GROUPED, of().high - first), left = within - first * of().across;

        row = (int64_t)((first + left % high) * CLUSTER + (int)cluster_rank()) * ROWS;
        column = (int64_t)(left / high) * COLUMNS;
    }
};

/* ---- the warp that has dy and x brought ---- */

template <typename P, typename T> __device__ void bring(shared_memory<T> &shared, const batch<P, T> &all)
{
    constexpr int SHARE = DEPTH / CLUSTER; /* of x's tokens */
    const int mine = (int)cluster_rank() * SHARE;
    const uint64_t policy = keep_policy(); /* weights and moments, used once, are not to push dy and x out */
    ring<STAGES> stage;

    for (tiles<P, T> tile(all); tile.more(); tile.next()) {
        const CUtensorMap *dy = &all.dy[tile.which], *x = &all.x[tile.which];
        const int tokens = (int)tile.of().tokens;
        int64_t row, column;
        tile.place(row, column);
        for (int token = 0; token < tokens; token += DEPTH, stage.advance()) {
            T(&panels)[STAGE_PANELS][PANEL] = shared.stages[stage.place];
            uint64_t *full = &shared.full[stage.place];

            barrier_wait(&shared.empty[stage.place], stage.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            for (int i = 0; i < DY_PANELS; i++)
                copy_box(panels[i], dy, (int)row + i * PANEL_COLUMNS, token, full, policy);
            for (int i = 0; i < X_PANELS; i++)
                copy_box_to((1 << CLUSTER) - 1, panels[DY_PANELS + i] + mine * PANEL_COLUMNS, x,
                            (int)column + i * PANEL_COLUMNS, token + mine, full, policy);
        }
    }
}

/* ---- the warpgroups that multiply ---- */

template <typename T> __device__ void put_grads(T *grads, const float (&sums)[COLUMNS / 2])
{
    const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4;

#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float pair[2] = {sums[4 * j + 2 * h], sums[4 * j + 2 * h + 1]};
            store(grads + (row + 8 * h) * PITCH + 8 * j + lane % 4 * 2, 0, rounded<T>(pair));
        }
}

template <typename P, typename T>
__device__ void multiply(shared_memory<T> &shared, const batch<P, T> &all, int half)
{
    const int lane = threadIdx.x % 32;
    ring<STAGES> stage;
    ring<1> turn;

    for (tiles<P, T> tile(all); tile.more(); tile.next(), turn.advance()) {
        float sums[COLUMNS / 2];
        const int tokens = (int)tile.of().tokens;
        int before = 0; /* the stage whose products may still be under way */

        for (int token = 0; token < tokens; token += DEPTH, stage.advance()) {
            T(&panels)[STAGE_PANELS][PANEL] = shared.stages[stage.place];
            const uint64_t a = transposed_panels(panels[half], PANEL_BYTES),
                           b = transposed_panels(panels[DY_PANELS], PANEL_BYTES);

            barrier_wait(&shared.full[stage.place], stage.parity);
            product_begin();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
                product_64x192_transposed<T>(sums, a + k * PANEL_STEP, b + k * PANEL_STEP,
                                             token > 0 || k > 0);
            product_commit();
            product_wait<1>();
            if (token > 0 && lane < CLUSTER)
                barrier_arrive_at(&shared.empty[before], lane);
            before = stage.place;
        }
        product_finish(sums);
        if (lane < CLUSTER)
            barrier_arrive_at(&shared.empty[before], lane);

        barrier_wait(&shared.grads_empty[half], turn.parity ^ 1);
        put_grads(shared.grads[half], sums);
        barrier_arrive(&shared.grads_full[half]);
    }
}

/* ---- the warps that update ---- */

/* Around the first cache, as every byte of the weights and their moments is used once a step. To have them
 * leave the second one early (.cs) takes 3 % longer. */
template <typename T> __device__ pack<T, 4> load_once(const T *array)
{
    using piece = word<4 * sizeof(T)>;
    const piece bits = __ldcg(reinterpret_cast<const piece *>(array));
    pack<T, 4> result;

    memcpy(&result, &bits, sizeof result);
    return result;
}

template <typename T> __device__ void store_once(T *array, const pack<T, 4> &values)
{
    using piece = word<4 * sizeof(T)>;
    piece bits;

    memcpy(&bits, &values, sizeof bits);
    __stcg(reinterpret_cast<piece *>(array), bits);
}

/* What a thread updates at a time: four columns in each half of a row. */
template <typename P> struct piece {
    pack<P, 4> weights[2];
    pack<float, 4> first[2], second[2];
};

constexpr int ACROSS = COLUMNS / 2, QUADS = ACROSS / 4,
              STRIDE = 32 * UPDATERS / QUADS; /* rows taken at a time */
constexpr int PIECES = HALF / STRIDE;
static_assert(QUADS * STRIDE == 32 * UPDATERS && PIECES * STRIDE == HALF && PIECES % 2 == 0);

/* A thread's part of half a tile: its columns of every STRIDE-th row. */
template <typename P, typename T> struct part {
    P *p;
    float *m, *v;
    T *copy; /* without `copies` no address of use */
    bool copies;
    int step;    /* elements from one of its rows to the next */
    int rows;    /* of the weight, from its first row on; 0 or less: none */
    bool has[2]; /* of the columns' halves */

    __device__ part(const tiles<P, T> &tile, int half, int thread) : rows(0)
    {
        int64_t row, column;

        if (!tile.more())
            return;
        tile.place(row, column);
        row += half * HALF + thread / QUADS;
        column += thread % QUADS * 4;

        const layer<P, T> &of = tile.of();
        const int64_t at = row * of.d_in + column;
        p = of.p + at;
        m = of.m + at;
        v = of.v + at;
        copies = of.copy != nullptr;
        copy = (copies ? of.copy : (T *)of.m) + at;
        step = STRIDE * (int)of.d_in;
        rows = (int)min(of.d_out - row, (int64_t)HALF);
        has[0] = column < of.d_in;
        has[1] = column + ACROSS < of.d_in;
    }

    __device__ void bring(int index, piece<P> &out) const
    {
        const int at = index * step;
        const bool here = index * STRIDE < rows;
        const P *const weights = p + at;
        const float *const first = m + at, *const second = v + at;

#pragma unroll
        for (int i = 0; i < 2; i++)
            if (here && has[i]) {
                out.weights[i] = load_once(weights + i * ACROSS);
                out.first[i] = load_once(first + i * ACROSS);
                out.second[i] = load_once(second + i * ACROSS);
            }
    }

    /* Eight chains of arithmetic fill each other's waits. `grads` are those of the thread's first row and
     * columns. */
    __device__ void update(const adamw_constants &k, int index, const T *grads, piece<P> &mine) const
    {
        const int at = index * step;
        const bool here = index * STRIDE < rows;
        P *const weights = p + at;
        float *const first = m + at, *const second = v + at;
        T *const rounds = copy + at;
        pack<T, 4> copied[2];

#pragma unroll
        for (int i = 0; i < 2; i++) {
            const pack<T, 4> grad = load<4>(grads + index * STRIDE * PITCH + i * ACROSS, 0);
            float result[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                result[j] = mine.weights[i][j];
                k.step(grad[j], result[j], mine.first[i].at[j], mine.second[i].at[j]);
            }
            mine.weights[i] = rounded<P>(result);
            copied[i] = rounded<T>(result);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (here && has[i]) {
                store_once(first + i * ACROSS, mine.first[i]);
                store_once(second + i * ACROSS, mine.second[i]);
                store_once(weights + i * ACROSS, mine.weights[i]);
                if (copies)
                    store_once(rounds + i * ACROSS, copied[i]);
            }
    }
};

/* One piece is on its way from memory while the other is updated, each brought with all its loads at once: a
 * warp waits for loads by one of six counters, and where younger loads have joined an older one's it waits
 * for them too. */
template <typename P, typename T>
__device__ void update(shared_memory<T> &shared, const batch<P, T> &all, int thread, const td_adamw *adamw,
                       const td_update_state *state)
{
    const int grads_at = thread / QUADS * PITCH + thread % QUADS * 4;
    piece<P> a = {}, b = {};
    ring<1> turn;

    const adamw_constants k = constants_of(*adamw, *state);
    tiles<P, T> tile(all);
    part<P, T> now(tile, 0, thread);
    now.bring(0, a);
    for (; tile.more(); turn.advance()) {
        for (int half = 0; half < 2; half++) {
            const T *grads = shared.grads[half] + grads_at;

            if (half == 1)
                tile.next();
            const part<P, T> next(tile, half ^ 1, thread);
            barrier_wait(&shared.grads_full[half], turn.parity);
#pragma unroll 1
            for (int i = 0; i < PIECES; i += 2) {
                now.bring(i + 1, b);
                now.update(k, i, grads, a);
                if (i + 2 < PIECES)
                    now.bring(i + 2, a);
                else
                    next.bring(0, a);
                now.update(k, i + 1, grads, b);
            }
            barrier_arrive(&shared.grads_empty[half]);
            now = next;
        }
    }
}

/* ---- the kernel ---- */

#if defined __CUDA_ARCH__ && __CUDA_ARCH__ < 900
#define CLUSTERED /* nothing: the compiler refuses clusters here, and the kernel is never launched */
#else
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#endif

template <typename P, typename T>
__global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    td_linear_adamw_update(const __grid_constant__ batch<P, T> all, const td_adamw *adamw,
                           const td_update_state *state)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_memory<T> &shared = *reinterpret_cast<shared_memory<T> *>(memory);
    const int group = threadIdx.x / GROUP, server = (int)threadIdx.x - 2 * GROUP;

    if (threadIdx.x == 0) {
        for (int i = 0; i < all.count; i++) {
            prefetch_map(&all.dy[i]);
            prefetch_map(&all.x[i]);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], CLUSTER * 2 * WARPS); /* whoever multiplies, in both blocks */
        }
        /* Every thread that writes or reads the gradient, though a warp's first lane could arrive for all of
         * it in the same time: compute-sanitizer takes the others' accesses for races. */
        for (int i = 0; i < 2; i++) {
            barrier_init(&shared.grads_full[i], GROUP);
            barrier_init(&shared.grads_empty[i], 32 * UPDATERS);
        }
        barrier_init_done();
    }
    cluster_sync();
    if (group < 2)
        multiply(shared, all, group);
    else if (server < 32 * UPDATERS)
        update(shared, all, server, adamw, state);
    else if (server == 2 * GROUP - 32)
        bring(shared, all);
    __syncwarp();
    cluster_sync(); /* the other block may still copy and arrive here */
#else
    __trap(); /* the host launches it on sm_90a alone */
#endif
}

/* ---- on the host ---- */

/* The driver's function that makes a map, without linking the driver; nullptr: it has none. */
using map_encoder = PFN_cuTensorMapEncodeTiled_v12000;

map_encoder find_map_encoder()
{
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;

    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
        return nullptr;
    return reinterpret_cast<map_encoder>(found);
}

/* A matrix [tokens, columns] in boxes of `rows` rows of a panel; what lies outside is read as 0. */
template <typename T>
bool map_matrix(map_encoder encode, const void *matrix, int64_t tokens, int64_t columns, int rows,
                CUtensorMap *out)
{
    const cuuint64_t extents[] = {(cuuint64_t)columns, (cuuint64_t)tokens},
                     pitch[] = {(cuuint64_t)columns * sizeof(T)};
    const cuuint32_t box[] = {PANEL_COLUMNS, (cuuint32_t)rows}, steps[] = {1, 1};

    return encode(out,
                  std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  2, const_cast<void *>(matrix), extents, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <typename P, typename T>
cudaError_t launch(cudaStream_t stream, int multiprocessors, const td_adamw *adamw,
                   const td_update_state *state, int count, const td_linear_adamw *given)
{
    constexpr int BYTES = (int)sizeof(shared_memory<T>);
    const map_encoder encode = find_map_encoder();
    const int most = multiprocessors / CLUSTER; /* that run at a time: a block fills a multiprocessor */
    batch<P, T> all = {};
    const cudaError_t code = cudaFuncSetAttribute(td_linear_adamw_update<P, T>,
                                                  cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);

    if (code != cudaSuccess)
        return code;
    if (!encode)
        return cudaErrorNotSupported;
    all.count = count;
    for (int i = 0; i < count; i++) {
        const td_linear_adamw *l = &given[i];
        const int high = (int)((l->d_out - 1) / (CLUSTER * ROWS) + 1),
                  across = (int)((l->d_in - 1) / COLUMNS + 1);

        all.layers[i] = {l->tokens, l->d_in,   l->d_out, all.end, high,
                         across,    (P *)l->p, l->m,     l->v,    (T *)l->copy};
        all.end += high * across;
        if (!map_matrix<T>(encode, l->dy, l->tokens, l->d_out, DEPTH, &all.dy[i]) ||
            !map_matrix<T>(encode, l->x, l->tokens, l->d_in, DEPTH / CLUSTER, &all.x[i]))
            return cudaErrorNotSupported;
    }
    td_linear_adamw_update<P, T>
        <<<(unsigned)(CLUSTER * (all.end < most ? all.end : most)), THREADS, BYTES, stream>>>(all, adamw,
                                                                                              state);
    return cudaGetLastError();
}

} // namespace

bool td_cuda_linear_adamw_built(int capability)
{
#ifdef TANDEM_HAVE_SM90A
    return capability == 90;
#else
    (void)capability;
    return false;
#endif
}

bool td_cuda_linear_adamw_pays(int multiprocessors, int count, const td_linear_adamw *layers)
{
    int64_t tiles = 0;

    for (int i = 0; i < count; i++)
        tiles += ((layers[i].d_out - 1) / ROWS + 1) * ((layers[i].d_in - 1) / COLUMNS + 1);
    return tiles >= 2 * multiprocessors;
}

cudaError_t td_cuda_linear_adamw(cudaStream_t stream, int multiprocessors, const td_adamw *adamw,
                                 const td_update_state *state, int count, const td_linear_adamw *layers)
{
    const bool wide = layers->p_dtype == TD_F32;

    if (layers->dtype == TD_F16)
        return wide ? launch<float, f16>(stream, multiprocessors, adamw, state, count, layers)
                    : launch<f16, f16>(stream, multiprocessors, adamw, state, count, layers);
    return wide ? launch<float, bf16>(stream, multiprocessors, adamw, state, count, layers)
                : launch<bf16, bf16>(stream, multiprocessors, adamw, state, count, layers);
}
