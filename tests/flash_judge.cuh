/** How flash_race judges attention: poisoned memory, random inputs, differences, float64 on sampled rows, and
 * two identities of all rows. */
#ifndef TD_TESTS_FLASH_JUDGE_CUH
#define TD_TESTS_FLASH_JUDGE_CUH

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include <unistd.h>

namespace
{

/* ---- memory, random numbers, comparisons ---- */

void check(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(code));
    fflush(stdout);
    _exit(3);
}

struct block {
    void *at = nullptr;
    size_t bytes;

    explicit block(size_t size) : bytes(size)
    {
        check(cudaMalloc(&at, std::max<size_t>(size, 256)), "cudaMalloc");
        poison();
    }
    block(const block &) = delete;
    ~block()
    {
        cudaFree(at);
    }
    void poison() /* all bytes 0xFF, a NaN in every float type */
    {
        check(cudaMemset(at, 0xFF, bytes), "cudaMemset");
    }
};

__device__ uint32_t mixed(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

template <typename T> __global__ void draw(T *x, int64_t count, uint32_t seed)
{
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (i < count) {
        const uint32_t a = mixed((uint32_t)i + seed * 0x9E3779B9u), b = mixed(a ^ 0x68E31DA4u);
        const float r = sqrtf(-2.0f * logf((a + 1.0f) / 4294967552.0f));
        x[i] = (T)(r * cospif(2.0f * b / 4294967296.0f));
    }
}

struct differences {
    double squares, of_reference;
    unsigned long long not_finite, bits;
};

template <typename T> __global__ void compare(const T *x, const T *reference, int64_t count, differences *out)
{
    double squares = 0, of_reference = 0;
    unsigned long long not_finite = 0, bits = 0;

    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const double a = (float)x[i], b = (float)reference[i];
        not_finite += !isfinite(a);
        bits += !(a == b || (isnan(a) && isnan(b)));
        squares += (a - b) * (a - b);
        of_reference += b * b;
    }
    atomicAdd(&out->squares, squares);
    atomicAdd(&out->of_reference, of_reference);
    atomicAdd(&out->not_finite, not_finite);
    atomicAdd(&out->bits, bits);
}

/* ---- float64 on sampled rows: one block for each ---- */

struct problem {
    const void *q, *k, *v, *dout, *o;
    const float *lse;
    int heads, o_heads, seq, seq_k, head_dim;
    double scale;
    bool causal;

    __device__ int64_t o_at(int head, int row) const
    {
        return (((int64_t)(head / o_heads) * seq + row) * o_heads + head % o_heads) * head_dim;
    }
};

constexpr int THREADS = 256, SAMPLES = 48;

__device__ double sum_of_block(double x)
{
    __shared__ double all[THREADS];

    all[threadIdx.x] = x;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if ((int)threadIdx.x < step)
            all[threadIdx.x] += all[threadIdx.x + step];
        __syncthreads();
    }
    const double sum = all[0];
    __syncthreads();
    return sum;
}

template <typename T> __device__ double dot(const T *a, const T *b, int count)
{
    double sum = 0;

    for (int i = 0; i < count; i++)
        sum += (double)(float)a[i] * (double)(float)b[i];
    return sum;
}

/** Writes o, dq (head_dim numbers each) and lse of a query. `work` has two numbers for each key. */
template <typename T>
__global__ void sample_queries(problem p, const int2 *samples, double *work, double *o, double *dq,
                               double *lse)
{
    const int head = samples[blockIdx.x].x, query = samples[blockIdx.x].y;
    const int keys = p.causal ? min(p.seq_k, query + 1) : p.seq_k;
    const T *const q = (const T *)p.q + ((int64_t)head * p.seq + query) * p.head_dim,
                   *const dout = (const T *)p.dout + p.o_at(head, query),
                   *const k = (const T *)p.k + (int64_t)head * p.seq_k * p.head_dim,
                   *const v = (const T *)p.v + (int64_t)head * p.seq_k * p.head_dim;
    double *const weight = work + (int64_t)blockIdx.x * 2 * p.seq_k, *const dp = weight + p.seq_k;
    double sum = 0, with_dp = 0; /* scores of normal numbers need no maximum in float64 */

    for (int j = threadIdx.x; j < keys; j += THREADS) {
        weight[j] = exp(p.scale * dot(q, k + (int64_t)j * p.head_dim, p.head_dim));
        dp[j] = dot(dout, v + (int64_t)j * p.head_dim, p.head_dim);
        sum += weight[j];
        with_dp += weight[j] * dp[j];
    }
    sum = sum_of_block(sum);
    with_dp = sum_of_block(with_dp) / sum;
    for (int c = 0; c < p.head_dim; c++) {
        double mine = 0, gradient = 0;
        for (int j = threadIdx.x; j < keys; j += THREADS) {
            mine += weight[j] * (double)(float)v[(int64_t)j * p.head_dim + c];
            gradient += weight[j] * (dp[j] - with_dp) * (double)(float)k[(int64_t)j * p.head_dim + c];
        }
        mine = sum_of_block(mine) / sum;
        gradient = sum_of_block(gradient) / sum * p.scale;
        if (threadIdx.x == 0) {
            o[blockIdx.x * p.head_dim + c] = mine;
            dq[blockIdx.x * p.head_dim + c] = gradient;
        }
    }
    if (threadIdx.x == 0)
        lse[blockIdx.x] = log(sum);
}

/** Writes dk and dv of a key, from the given o and lse. `work` has two numbers for each query. */
template <typename T>
__global__ void sample_keys(problem p, const int2 *samples, double *work, double *dk, double *dv)
{
    const int head = samples[blockIdx.x].x, key = samples[blockIdx.x].y;
    const int first = p.causal ? min(key, p.seq) : 0;
    const T *const q = (const T *)p.q + (int64_t)head * p.seq * p.head_dim, *const dout = (const T *)p.dout,
                   *const o = (const T *)p.o,
                   *const k = (const T *)p.k + ((int64_t)head * p.seq_k + key) * p.head_dim,
                   *const v = (const T *)p.v + ((int64_t)head * p.seq_k + key) * p.head_dim;
    double *const weight = work + (int64_t)blockIdx.x * 2 * p.seq, *const ds = weight + p.seq;

    for (int i = first + threadIdx.x; i < p.seq; i += THREADS) {
        const int64_t at = p.o_at(head, i);
        weight[i] = exp(p.scale * dot(q + (int64_t)i * p.head_dim, k, p.head_dim) -
                        (double)p.lse[(int64_t)head * p.seq + i]);
        ds[i] = weight[i] * (dot(dout + at, v, p.head_dim) - dot(dout + at, o + at, p.head_dim));
    }
    __syncthreads();
    for (int c = 0; c < p.head_dim; c++) {
        double a = 0, b = 0;
        for (int i = first + threadIdx.x; i < p.seq; i += THREADS) {
            a += ds[i] * (double)(float)q[(int64_t)i * p.head_dim + c];
            b += weight[i] * (double)(float)dout[p.o_at(head, i) + c];
        }
        a = sum_of_block(a) * p.scale;
        b = sum_of_block(b);
        if (threadIdx.x == 0) {
            dk[blockIdx.x * p.head_dim + c] = a;
            dv[blockIdx.x * p.head_dim + c] = b;
        }
    }
}

/** Computes the error of two identities of a head, with a block for each: <dO, O> = <dV, V> and <dQ, Q> =
 * <dK, K>. Both sides are sums over all rows, so the error shows a missing tile. Its unit is the norm of the
 * left side's terms. */
template <typename T>
__global__ void identities(problem p, const T *dq, const T *dk, const T *dv, double2 *errors)
{
    const int head = blockIdx.x;
    const int64_t first = (int64_t)head * p.seq * p.head_dim, first_k = (int64_t)head * p.seq_k * p.head_dim;
    double of_o = 0, of_q = 0, o_squares = 0, q_squares = 0;

    for (int64_t i = threadIdx.x; i < (int64_t)p.seq * p.head_dim; i += THREADS) {
        const int64_t at = p.o_at(head, (int)(i / p.head_dim)) + i % p.head_dim;
        const double a = (double)(float)((const T *)p.dout)[at] * (double)(float)((const T *)p.o)[at];
        const double b = (double)(float)dq[first + i] * (double)(float)((const T *)p.q)[first + i];
        of_o += a;
        of_q += b;
        o_squares += a * a;
        q_squares += b * b;
    }
    for (int64_t i = threadIdx.x; i < (int64_t)p.seq_k * p.head_dim; i += THREADS) {
        of_o -= (double)(float)dv[first_k + i] * (double)(float)((const T *)p.v)[first_k + i];
        of_q -= (double)(float)dk[first_k + i] * (double)(float)((const T *)p.k)[first_k + i];
    }
    of_o = sum_of_block(of_o);
    of_q = sum_of_block(of_q);
    o_squares = sum_of_block(o_squares);
    q_squares = sum_of_block(q_squares);
    if (threadIdx.x == 0)
        errors[head] = make_double2(fabs(of_o) / sqrt(o_squares), fabs(of_q) / sqrt(q_squares));
}

/** Copies the rows of the samples from a tensor of any layout. */
template <typename T>
__global__ void pick(problem p, bool like_o, const T *tensor, int rows, const int2 *samples, double *out)
{
    const int head = samples[blockIdx.x].x, row = samples[blockIdx.x].y;
    const int64_t at = like_o ? p.o_at(head, row) : ((int64_t)head * rows + row) * p.head_dim;

    for (int c = threadIdx.x; c < p.head_dim; c += blockDim.x)
        out[blockIdx.x * p.head_dim + c] = (double)(float)tensor[at + c];
}

} // namespace

#endif
