/** The parts of kernels/hopper/, compared with plain loops. Values are small integers, so every result is
 * exact. */
#include "kernels/hopper/copies.cuh"
#include "kernels/hopper/gemm.cuh"
#include "kernels/hopper/maps.cuh"

#include <cstdio>
#include <cstdlib>

extern "C" {
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
}

namespace
{

using namespace hopper;

void check(cudaError_t code, const char *what)
{
    if (code != cudaSuccess)
        fail_msg("%s: %s", what, cudaGetErrorString(code));
}

/** An array that host and GPU share. With a seed it has random integers from -4 to 4, so a wrong index shows.
 * Without a seed every element is -99. */
template <typename T> struct array {
    T *at = nullptr;
    int count;

    explicit array(int of, int seed = 0) : count(of)
    {
        check(cudaMallocManaged(&at, sizeof(T) * count), "cudaMallocManaged");
        for (int i = 0; i < count; i++)
            at[i] = (T)(float)(seed ? (int)((unsigned)(i + 1) * 2654435761u * (unsigned)seed >> 20) % 9 - 4
                                    : -99);
    }
    array(const array &) = delete;
    ~array()
    {
        cudaFree(at);
    }
    float operator[](int i) const
    {
        return (float)at[i];
    }
};

void assert_equal(const char *what, int row, int column, float found, float wanted)
{
    if (found != wanted)
        fail_msg("%s: (%d, %d) is %g, wanted %g", what, row, column, found, wanted);
}

/* ---- GEMM: c (64 x N) = A (64 x K) B (K x N), from panels of W bytes ---- */

enum left { ROWS, COLUMNS, REGISTERS };
constexpr int K = 64;

template <typename T, int N, left A, bool B_COLUMNS, int W>
__global__ __launch_bounds__(GROUP, 1) void multiply(const __grid_constant__ CUtensorMap a_map,
                                                     const __grid_constant__ CUtensorMap b_map, const T *a,
                                                     float *c)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t full;
    constexpr int A_ROWS = A == COLUMNS ? K : 64, B_ROWS = B_COLUMNS ? K : N, B_WIDTH = B_COLUMNS ? N : K;
    constexpr int PANELS = (B_WIDTH * 2 + W - 1) / W, A_BYTES = 64 * K * 2, B_BYTES = PANELS * B_ROWS * W;
    unsigned char *const b_tile = memory + A_BYTES;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, t = 2 * (lane % 4);
    float sums[N / 2];

    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
        barrier_expect(&full, A_BYTES + B_BYTES);
        load_tile<2 * K / W, W / 2>(memory, A_ROWS * W, &a_map, 0, 0, 0, &full,
                                    once_policy()); /* A is square */
        load_tile<PANELS, W / 2>(b_tile, B_ROWS * W, &b_map, 0, 0, 0, &full, once_policy());
    }
    __syncthreads();
    barrier_wait(&full, 0);
    const uint64_t b_operand = B_COLUMNS ? columns_operand<W>(shared_address(b_tile), B_ROWS * W)
                                         : rows_operand<W>(shared_address(b_tile));
    const uint64_t a_operand = A == COLUMNS ? columns_operand<W>(shared_address(memory), A_ROWS * W)
                                            : rows_operand<W>(shared_address(memory));
    uint32_t fragments[K / 16][4];
    for (int step = 0; step < K / 16; step++)
        for (int i = 0; i < 4; i++) {
            const T *const pair = a + (row + i % 2 * 8) * K + 16 * step + i / 2 * 8 + t;
            fragments[step][i] = *reinterpret_cast<const uint32_t *>(pair);
        }
    for (int i = 0; i < N / 2; i++)
        sums[i] = 7; /* the first GEMM must overwrite this */
    pin(sums);
    gemm_begin();
#pragma unroll
    for (int step = 0; step < K / 16; step++) {
        const uint64_t b = further(b_operand, B_COLUMNS ? columns_step<W>(step) : rows_step<W, B_ROWS>(step));
        if constexpr (A == REGISTERS)
            gemm<T, N, B_COLUMNS>(sums, fragments[step], b, step > 0);
        else
            gemm<T, N, A == COLUMNS, B_COLUMNS>(
                sums, further(a_operand, A == COLUMNS ? columns_step<W>(step) : rows_step<W, A_ROWS>(step)),
                b, step > 0);
    }
    gemm_commit();
    gemm_wait<0>();
    pin(sums);
    for (int i = 0; i < N / 2; i++)
        c[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + t + i % 2] = sums[i];
#endif
}

template <typename T, int N, left A, bool B_COLUMNS, int W> void try_gemm()
{
    const array<T> a(64 * K, 3), b(N * K, 5);
    array<float> c(64 * N);
    CUtensorMap a_map, b_map;
    const map_encoder encode = find_map_encoder();
    const int b_width = B_COLUMNS ? N : K, b_rows = N * K / b_width;

    assert_true(make_map<T>(encode, &a_map, a.at, 64, 64, 1, 1, 64, W));
    assert_true(make_map<T>(encode, &b_map, b.at, b_width, b_rows, 1, 1, b_rows, W));
    const auto kernel = multiply<T, N, A, B_COLUMNS, W>;
    const int bytes = 64 * K * 2 + (b_width * 2 + W - 1) / W * b_rows * W;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "bytes");
    kernel<<<1, GROUP, bytes>>>(a_map, b_map, a.at, c.at);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "kernel");
    for (int i = 0; i < 64; i++)
        for (int j = 0; j < N; j++) {
            float sum = 0;
            for (int k = 0; k < K; k++)
                sum +=
                    (A == COLUMNS ? a[k * 64 + i] : a[i * K + k]) * (B_COLUMNS ? b[k * N + j] : b[j * K + k]);
            char what[80];
            snprintf(what, sizeof what, "N %d, A %d, B %d, swizzle %d, %s", N, A, B_COLUMNS, W,
                     std::is_same_v<T, __half> ? "f16" : "bf16");
            assert_equal(what, i, j, c[i * N + j], sum);
        }
}

template <typename T, int N, int W = 128> void try_operands()
{
    try_gemm<T, N, ROWS, false, W>();
    try_gemm<T, N, ROWS, true, W>();
    try_gemm<T, N, COLUMNS, false, W>();
    try_gemm<T, N, COLUMNS, true, W>();
    try_gemm<T, N, REGISTERS, false, W>();
    try_gemm<T, N, REGISTERS, true, W>();
}

void gemms_are_exact(void **state)
{
    (void)state;
    try_operands<__nv_bfloat16, 16>();
    try_operands<__nv_bfloat16, 80>();
    try_operands<__nv_bfloat16, 128>();
    try_operands<__nv_bfloat16, 256>();
    try_operands<__half, 64>();
    try_operands<__nv_bfloat16, 64, 64>();
    try_operands<__nv_bfloat16, 64, 32>();
}

/* ---- boxes: loads, the swizzle, stores ---- */

constexpr int BOX_ROWS = 24, PANELS = 2, HEADS = 6, TOGETHER = 3, ROWS_OF_HEAD = 40;

/** Copies a tile to shared memory, writes its bytes out, and stores it to another tensor. */
template <int W>
__global__ void copy_tile(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                          int row, int head, int to_row, int to_head, __nv_bfloat16 *seen)
{
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(1024) unsigned char tile[PANELS][(BOX_ROWS * W + 1023) / 1024 * 1024];
    __shared__ uint64_t full;

    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_init_done();
        barrier_expect(&full, PANELS * BOX_ROWS * W);
        load_tile<PANELS, W / 2>(tile, sizeof tile[0], &from, row, head % TOGETHER, head / TOGETHER, &full,
                                 keep_policy());
        barrier_wait(&full, 0);
        for (int p = 0; p < PANELS; p++)
            store_box(&to, tile[p], p * W / 2, to_row, to_head % TOGETHER, to_head / TOGETHER);
        bulk_commit();
        bulk_wait<0>();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PANELS * BOX_ROWS * W / 2; i += blockDim.x) {
        const int column = i % (PANELS * W / 2), at = i / (PANELS * W / 2) * W + column % (W / 2) * 2;
        seen[i] = *reinterpret_cast<__nv_bfloat16 *>(tile[column / (W / 2)] + swizzled<W>(at));
    }
#endif
}

/** The index of an element of [HEADS / TOGETHER, ROWS_OF_HEAD, TOGETHER, columns]; -1: outside. */
int place_of(int columns, int head, int row, int column)
{
    if (row < 0 || row >= ROWS_OF_HEAD || column >= columns)
        return -1;
    return ((head / TOGETHER * ROWS_OF_HEAD + row) * TOGETHER + head % TOGETHER) * columns + column;
}

template <int W> void try_tile(int row, int to_row)
{
    constexpr int COLUMNS = PANELS * W / 2 - 8; /* the last panel is ragged */
    const array<__nv_bfloat16> from(HEADS * ROWS_OF_HEAD * COLUMNS, 7);
    array<__nv_bfloat16> to(from.count), seen(BOX_ROWS * PANELS * W / 2);
    CUtensorMap from_map, to_map;
    const map_encoder encode = find_map_encoder();
    const int head = 4, to_head = 2;
    char what[80];

    for (auto *const each : {&from_map, &to_map})
        assert_true(make_map<__nv_bfloat16>(encode, each, each == &to_map ? to.at : from.at, COLUMNS,
                                            ROWS_OF_HEAD, HEADS, TOGETHER, BOX_ROWS, W));
    copy_tile<W><<<1, 64>>>(from_map, to_map, row, head, to_row, to_head, seen.at);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "kernel");
    for (int i = 0; i < seen.count; i++) {
        const int r = i / (PANELS * W / 2), c = i % (PANELS * W / 2),
                  at = place_of(COLUMNS, head, row + r, c);
        snprintf(what, sizeof what, "loaded, swizzle %d, from row %d", W, row);
        assert_equal(what, r, c, seen[i], at < 0 ? 0 : from[at]);
    }
    for (int h = 0; h < HEADS; h++)
        for (int r = 0; r < ROWS_OF_HEAD; r++)
            for (int c = 0; c < COLUMNS; c++) {
                const bool stored = h == to_head && r >= to_row && r < to_row + BOX_ROWS;
                snprintf(what, sizeof what, "stored, swizzle %d, to row %d, head %d", W, to_row, h);
                assert_equal(what, r, c, to[place_of(COLUMNS, h, r, c)],
                             stored ? seen[(r - to_row) * PANELS * W / 2 + c] : -99);
            }
}

void boxes_are_exact(void **state)
{
    (void)state;
    try_tile<128>(3, 0);
    try_tile<128>(30, 29); /* goes beyond the last row */
    try_tile<64>(-5, 16);  /* begins before the first row */
    try_tile<32>(30, 2);
}

/* ---- fragments: accumulators to shared memory, as they are and transposed ---- */

template <bool TRANSPOSED> __global__ void store_fragment(__nv_bfloat16 *seen)
{
#if __CUDA_ARCH__ >= 900
    __shared__ alignas(128) unsigned char tile[16 * 32];
    const int lane = threadIdx.x;
    uint32_t x[4];

    for (int i = 0; i < 4; i++) { /* matrix i begins at row i % 2 * 8 and column i / 2 * 8 */
        const float first = (float)((i % 2 * 8 + lane / 4) * 16 + i / 2 * 8 + lane % 4 * 2);
        const __nv_bfloat162 pair = __floats2bfloat162_rn(first, first + 1);
        x[i] = *reinterpret_cast<const uint32_t *>(&pair);
    }
    const int row = lane % 8, matrix = lane / 8;
    if (TRANSPOSED)
        store_matrices_transposed(shared_address(tile) + (matrix / 2 * 8 + row) * 32 + matrix % 2 * 16, x);
    else
        store_matrices(shared_address(tile) + (matrix % 2 * 8 + row) * 32 + matrix / 2 * 16, x);
    __syncwarp();
    for (int i = lane; i < 256; i += 32)
        seen[i] = reinterpret_cast<const __nv_bfloat16 *>(tile)[i];
#endif
}

void fragments_keep_their_places(void **state)
{
    array<__nv_bfloat16> plain(256), transposed(256);

    (void)state;
    store_fragment<false><<<1, 32>>>(plain.at);
    store_fragment<true><<<1, 32>>>(transposed.at);
    check(cudaDeviceSynchronize(), "kernel");
    for (int i = 0; i < 256; i++) {
        assert_equal("fragment", i / 16, i % 16, plain[i], (float)i);
        assert_equal("transposed fragment", i / 16, i % 16, transposed[i], (float)(i % 16 * 16 + i / 16));
    }
}

/* ---- barriers: a ring of stages, turns, registers, clusters ---- */

constexpr int TILES = 20, GROUPS = 2, LIVE = 200;

/** One thread loads tiles of 128 floats. Two warpgroups each add up all tiles. They take turns, and write the
 * order of the turns. A thread keeps LIVE sums in registers, more than it has at the start. Each block stores
 * the sums of the other block of its cluster, and adds its sums to `all`. */
__global__ __launch_bounds__(GROUP *(1 + GROUPS), 1) //
    void add_tiles(const float *tiles, float *all, float *of_other, int *turns)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int STAGES = 3;
    __shared__ alignas(128) float tile[STAGES][GROUP], sums[GROUPS][GROUP];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    __shared__ int turn;
    const int group = threadIdx.x / GROUP - 1, thread = threadIdx.x % GROUP;
    ring<STAGES> stage;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], 1);
            barrier_init(&empty[i], GROUPS * GROUP);
        }
        barrier_init_done();
        turn = 0;
    }
    __syncthreads();
    if (group < 0) {
        give_registers<24>();
        for (int i = 0; threadIdx.x == 0 && i < TILES; i++, stage.advance()) {
            barrier_wait(&empty[stage.place], stage.parity ^ 1);
            barrier_expect(&full[stage.place], sizeof tile[0]);
            bulk_load(tile[stage.place], tiles + (blockIdx.x * TILES + i) * GROUP, sizeof tile[0],
                      &full[stage.place]);
        }
        return;
    }
    take_registers<240>();
    float kept[LIVE], sum = 0;
#pragma unroll
    for (int i = 0; i < LIVE; i++)
        kept[i] = 0;
    if (group == 1)
        group_arrive<GROUPS * GROUP>(1); /* group 0 has the first turn */
    for (int i = 0; i < TILES; i++, stage.advance()) {
        barrier_wait(&full[stage.place], stage.parity);
        const float x = tile[stage.place][thread];
        barrier_arrive(&empty[stage.place]);
        pin(kept);
#pragma unroll
        for (int j = 0; j < LIVE; j++)
            kept[j] += x;
        group_sync<GROUPS * GROUP>(1 + group);
        if (thread == 0)
            turns[blockIdx.x * GROUPS * TILES + turn++] = group;
        if (group == 0 || i + 1 < TILES)
            group_arrive<GROUPS * GROUP>(1 + (group ^ 1));
    }
#pragma unroll
    for (int j = 0; j < LIVE; j++)
        sum += kept[j];
    sums[group][thread] = sum * (float)(1 + group);
    bulk_fence();
    group_sync<GROUP>(3 + group);
    if (thread == 0) {
        bulk_add(all + group * GROUP, sums[group], sizeof sums[group]);
        bulk_store(of_other + (blockIdx.x * 3 + group) * GROUP, sums[group], sizeof sums[group]);
        bulk_commit();
        bulk_wait<0>();
    }
    __syncwarp();
    cluster_sync();
    if (group == 0 && thread < GROUP / 4) {
        const uint32_t from = shared_address(sums[1] + 4 * thread);
        const float4 x = load_four_of_block(from, blockIdx.x ^ 1);
        const float2 y = load_pair_of_block(from, blockIdx.x ^ 1);
        float *const to = of_other + (blockIdx.x * 3 + 2) * GROUP + 4 * thread;
        to[0] = y.x;
        to[1] = y.y;
        to[2] = x.z;
        to[3] = x.w;
    }
    cluster_sync(); /* a block must not end before the other has read its memory */
#endif
}

void barriers_hand_over_every_tile(void **state)
{
    const array<float> tiles(2 * TILES * GROUP, 11);
    array<float> all(GROUPS * GROUP), seen(2 * 3 * GROUP);
    array<int> turns(2 * GROUPS * TILES);
    cudaLaunchAttribute cluster = {};
    cudaLaunchConfig_t config = {};

    (void)state;
    for (int i = 0; i < all.count; i++)
        all.at[i] = 5;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {2, 1, 1};
    config.gridDim = 2;
    config.blockDim = GROUP * (1 + GROUPS);
    config.attrs = &cluster;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, add_tiles, (const float *)tiles.at, all.at, seen.at, turns.at),
          "launch");
    check(cudaDeviceSynchronize(), "kernel");
    for (int thread = 0; thread < GROUP; thread++) {
        float sums[2] = {};
        for (int i = 0; i < 2 * TILES; i++)
            sums[i / TILES] += LIVE * tiles[i * GROUP + thread];
        for (int block = 0; block < 2; block++)
            for (int row = 0; row < 3; row++)
                assert_equal("sums of a block", block * 3 + row, thread,
                             seen[(block * 3 + row) * GROUP + thread],
                             row == 2 ? 2 * sums[block ^ 1] : (1 + row) * sums[block]);
        for (int group = 0; group < GROUPS; group++)
            assert_equal("sums of all blocks", group, thread, all[group * GROUP + thread],
                         5 + (1 + group) * (sums[0] + sums[1]));
    }
    for (int i = 0; i < turns.count; i++)
        assert_int_equal(turns.at[i], i % GROUPS);
}

} // namespace

int main(void)
{
    const CMUnitTest tests[] = {
        cmocka_unit_test(gemms_are_exact),
        cmocka_unit_test(boxes_are_exact),
        cmocka_unit_test(fragments_keep_their_places),
        cmocka_unit_test(barriers_hand_over_every_tile),
    };
    int major = 0, minor = 0;

    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) != cudaSuccess || major != 9 ||
        minor != 0 || !find_map_encoder()) {
        const bool required = getenv("TD_REQUIRE_GPU") != nullptr && major == 9;
        printf("%s: no GPU of Hopper\n", required ? "failed" : "skipped");
        return required ? 1 : 77;
    }
    return cmocka_run_group_tests(tests, nullptr, nullptr);
}
