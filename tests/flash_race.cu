/** Races flash attention's kernels on one GPU: flash_race [-o FILE.json] [-p forward|backward] [-w WORDS]...
 * [-t] [-n] [-d].
 *
 * Each row of the table is a shape. For each pass the portable kernels and, if the GPU has them, Hopper's run
 * on poisoned outputs and scratch. Their results are compared with each other and with float64 on sampled
 * rows. The time is the median of calls in a captured graph, with the clock and the power after it. -w: only
 * rows whose name contains one of the WORDS, -t: no rows that are only checked, -n: no portable kernels, -d:
 * deterministic gradients.
 *
 * A child process does the work. If a row takes longer than 10 s, the parent ends the child, notes the row as
 * hung, and starts another child with the next row. The program needs no library but the static CUDA
 * runtime. */
#include "kernels/flash.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace
{

/* ---- the table ---- */

struct row {
    int64_t batch, heads, head_dim, seq, seq_k;
    td_dtype dtype;
    bool causal, bshd, timed;
};

constexpr td_dtype B = TD_BF16, H = TD_F16;
const row ROWS[] = {
    /* the shapes of the targets: timed */
    {1, 16, 64, 16384, 16384, B, true, false, true},
    {1, 16, 128, 16384, 16384, B, true, false, true},
    {4, 12, 64, 512, 512, B, true, true, true},
    {4, 25, 64, 512, 512, B, true, true, true},
    {4, 32, 80, 512, 512, B, true, true, true},
    {1, 1, 64, 4096, 4096, B, true, false, true},
    {1, 32, 128, 32768, 32768, B, true, false, true},
    {1, 16, 64, 16384, 16384, B, false, false, true},
    {1, 16, 128, 16384, 16384, B, false, false, true},
    {1, 16, 64, 4096, 4096, B, true, false, true},
    {1, 16, 128, 4096, 4096, B, true, false, true},
    {1, 1, 128, 16384, 16384, B, true, false, true},
    {1, 16, 64, 16384, 16384, H, true, false, true},
    {1, 1, 64, 1024, 1024, B, true, false, true},
    {1, 1, 32, 8192, 8192, B, true, false, true},
    {1, 1, 16, 16384, 16384, B, true, false, true},
    {1, 1, 128, 65536, 65536, B, true, false, true},
    /* edges of tiles, unequal lengths, layouts: checked */
    {1, 1, 64, 64, 64, B, true, false, false},
    {1, 1, 64, 128, 128, B, false, false, false},
    {1, 2, 64, 1, 1, B, true, false, false},
    {2, 3, 64, 129, 129, B, true, true, false},
    {2, 3, 64, 200, 777, H, false, true, false},
    {2, 3, 64, 777, 200, B, true, false, false},
    {1, 2, 64, 193, 1000, B, true, true, false},
    {3, 5, 64, 1537, 1537, H, true, true, false},
    {1, 1, 128, 64, 64, B, true, false, false},
    {1, 1, 128, 128, 128, B, false, false, false},
    {1, 2, 128, 1, 300, H, false, false, false},
    {2, 3, 128, 129, 129, B, true, true, false},
    {2, 3, 128, 200, 777, H, false, true, false},
    {2, 3, 128, 777, 200, B, true, false, false},
    {3, 5, 128, 1537, 1537, H, true, true, false},
    {2, 3, 80, 333, 333, B, true, true, false},
    {2, 3, 96, 333, 200, B, true, false, false},
    {2, 3, 40, 333, 333, H, false, true, false},
    {1, 2, 64, 1100, 1100, H, true, true, false},
    {1, 1, 128, 300, 5000, B, false, false, false},
    {1, 1, 128, 3001, 1500, B, true, true, false},
    {2, 3, 24, 333, 200, B, true, false, false},
    {3, 200, 64, 130, 130, B, true, true, false},
    {3, 40, 128, 1537, 1537, B, true, true, false},
    {3, 40, 128, 1400, 300, H, false, true, false},
};

constexpr int PASSES = 2, WAYS = 2; /* forward, backward; portable, Hopper */
constexpr int UNITS = (int)(sizeof ROWS / sizeof *ROWS) * PASSES * WAYS;
const char *const PASS[] = {"forward", "backward"};
const char *const WAY[] = {"portable", "hopper"};

bool deterministic; /* -d */

td_attention_shape shape_of(const row &r)
{
    td_attention_shape shape = {};

    shape.batch = r.batch;
    shape.heads = r.heads;
    shape.seq = r.seq;
    shape.seq_k = r.seq_k;
    shape.head_dim = r.head_dim;
    shape.dtype = r.dtype;
    shape.causal = r.causal;
    shape.scale = 1.0f / std::sqrt((float)r.head_dim);
    shape.o_bshd = r.bshd;
    shape.deterministic = deterministic;
    return shape;
}

std::string name_of(const row &r)
{
    char name[128];

    snprintf(name, sizeof name, "%" PRId64 "x%" PRId64 "x%" PRId64 " %" PRId64 "%s %s%s%s", r.batch, r.heads,
             r.head_dim, r.seq, r.seq == r.seq_k ? "" : ("/" + std::to_string(r.seq_k)).c_str(),
             r.dtype == TD_BF16 ? "bf16" : "f16", r.causal ? " causal" : "", r.bshd ? " bshd" : "");
    return name;
}

/* ---- the GPU: memory, random numbers, comparisons ---- */

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
    void poison() /* every float type's NaN */
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

/* ---- float64 on sampled rows: a block each ---- */

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

/** Writes o, dq (head_dim numbers each) and lse of a query. `work` has room for two numbers for each key. */
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

/** Writes dk and dv of a key, of the given o and lse. `work` has room for two numbers for each query. */
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

/** The error of two identities of a head, a block each: <dO, O> = <dV, V> and <dQ, Q> = <dK, K>. Both sides
 * are sums over all rows, so a tile that is left out shows. The unit is the norm of the left side's terms. */
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

/** The rows of the samples, out of a tensor of any layout. */
template <typename T>
__global__ void pick(problem p, bool like_o, const T *tensor, int rows, const int2 *samples, double *out)
{
    const int head = samples[blockIdx.x].x, row = samples[blockIdx.x].y;
    const int64_t at = like_o ? p.o_at(head, row) : ((int64_t)head * rows + row) * p.head_dim;

    for (int c = threadIdx.x; c < p.head_dim; c += blockDim.x)
        out[blockIdx.x * p.head_dim + c] = (double)(float)tensor[at + c];
}

/* ---- the clock and the power, by NVML ---- */

struct nvml {
    void *device = nullptr;
    int (*clock)(void *, int, unsigned *) = nullptr;
    int (*power)(void *, unsigned *) = nullptr;

    nvml()
    {
        void *const library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!library)
            return;
        const auto init = (int (*)(void))dlsym(library, "nvmlInit_v2");
        const auto handle = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
        if (!init || !handle || init() != 0 || handle(0, &device) != 0)
            return;
        clock = (int (*)(void *, int, unsigned *))dlsym(library, "nvmlDeviceGetClockInfo");
        power = (int (*)(void *, unsigned *))dlsym(library, "nvmlDeviceGetPowerUsage");
    }
    int mhz() const
    {
        unsigned value = 0;
        return clock && clock(device, 1, &value) == 0 ? (int)value : 0; /* 1: NVML_CLOCK_SM */
    }
    double watts() const
    {
        unsigned value = 0;
        return power && power(device, &value) == 0 ? value / 1e3 : 0;
    }
};

/* ---- a row ---- */

double relative(const std::vector<double> &x, const std::vector<double> &truth)
{
    double squares = 0, of_truth = 0;

    for (size_t i = 0; i < truth.size(); i++) {
        squares += (x[i] - truth[i]) * (x[i] - truth[i]);
        of_truth += truth[i] * truth[i];
    }
    return std::sqrt(squares / (of_truth > 0 ? of_truth : 1));
}

struct timing {
    double us = 0, watts = 0;
    int mhz = 0;
};

/** The median time of a call, in a graph of at least 20. */
template <typename F> timing time_of(cudaStream_t stream, F call)
{
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    cudaEvent_t begin, end;
    constexpr int CALLS = 20;
    std::vector<float> times;
    static const nvml sensor;
    timing out;

    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < CALLS; i++)
        call();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&ready, graph, 0), "graph");
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = 0, runs = 4; i < runs; i++) {
        float ms;
        cudaEventRecord(begin, stream);
        check(cudaGraphLaunch(ready, stream), "graph");
        cudaEventRecord(end, stream);
        while (i == runs - 1 && cudaEventQuery(end) == cudaErrorNotReady) {
            out.mhz = sensor.mhz();
            out.watts = sensor.watts();
        }
        check(cudaEventSynchronize(end), "graph");
        cudaEventElapsedTime(&ms, begin, end);
        if (i > 0)
            times.push_back(ms * 1e3f / CALLS);
        else
            runs = std::clamp((int)(60 / ms), 4, 40);
    }
    std::sort(times.begin(), times.end());
    out.us = times[times.size() / 2];
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
    return out;
}

struct result {
    std::string name; /* of an output, or of an identity */
    double truth, judge,
        against; /* relative L2: from float64, the portable one from float64, from each other */
    unsigned long long not_finite, changed; /* elements that are not finite, that differ between two calls */
};

template <typename T> struct race {
    const row &r;
    const td_attention_shape shape = shape_of(r);
    const int64_t rows = r.batch * r.heads * r.seq, queries = rows * r.head_dim,
                  keys = r.batch * r.heads * r.seq_k * r.head_dim;
    block q{queries * sizeof(T)}, k{keys * sizeof(T)}, v{keys * sizeof(T)}, dout{queries * sizeof(T)},
        o{queries * sizeof(T)}, lse{rows * sizeof(float)};
    block samples_q{SAMPLES * sizeof(int2)}, samples_k{SAMPLES * sizeof(int2)};
    problem p = {};
    td_flash_gpu portable, gpu;
    cudaStream_t stream;
    std::vector<result> results;

    race(const row &given, td_flash_gpu on, cudaStream_t in) : r(given), portable(on), gpu(on), stream(in)
    {
        std::vector<int2> some(SAMPLES);
        const int heads = (int)(r.batch * r.heads);

        portable.capability = 80;
        fill(q, queries, 1);
        fill(k, keys, 2);
        fill(v, keys, 3);
        fill(dout, queries, 4);
        for (const bool of_keys : {false, true}) {
            const int most = (int)(of_keys ? r.seq_k : r.seq);
            const int edges[] = {0, 63, 64, 127, 128, 191, 192, most - 1, most - 64, most - 65};
            for (int i = 0; i < SAMPLES; i++) {
                const int row = i < 10 ? edges[i] : (int)((i * 2654435761u) % (unsigned)most);
                some[i] = make_int2(i % heads, std::clamp(row, 0, most - 1));
            }
            cudaMemcpy(of_keys ? samples_k.at : samples_q.at, some.data(), sizeof(int2) * SAMPLES,
                       cudaMemcpyHostToDevice);
        }
        p.q = q.at;
        p.k = k.at;
        p.v = v.at;
        p.dout = dout.at;
        p.o = o.at;
        p.lse = (const float *)lse.at;
        p.heads = heads;
        p.o_heads = r.bshd ? (int)r.heads : 1;
        p.seq = (int)r.seq;
        p.seq_k = (int)r.seq_k;
        p.head_dim = (int)r.head_dim;
        p.scale = shape.scale;
        p.causal = r.causal;
        run_forward(portable, o, lse);
    }

    void fill(block &b, int64_t count, uint32_t seed)
    {
        draw<T><<<(unsigned)((count + 255) / 256), 256, 0, stream>>>((T *)b.at, count, seed);
        check(cudaGetLastError(), "draw");
    }

    void run_forward(td_flash_gpu on, block &to_o, block &to_lse)
    {
        block work(td_cuda_flash_forward_bytes(on, &shape));

        forward_call(on, to_o, to_lse, work);
        check(cudaStreamSynchronize(stream), "forward");
    }
    void forward_call(td_flash_gpu on, block &to_o, block &to_lse, block &work)
    {
        check(
            td_cuda_flash_forward(stream, on, &shape, q.at, k.at, v.at, to_o.at, (float *)to_lse.at, work.at),
            "forward");
    }
    void backward_call(td_flash_gpu on, block &dq, block &dk, block &dv, block &work)
    {
        check(td_cuda_flash_backward(stream, on, &shape, q.at, k.at, v.at, o.at, dout.at,
                                     (const float *)lse.at, dq.at, dk.at, dv.at, work.at),
              "backward");
    }

    differences between(const block &x, const block &reference, int64_t count, bool floats)
    {
        block out(sizeof(differences));
        differences d;

        cudaMemset(out.at, 0, sizeof d);
        if (floats)
            compare<<<512, 256, 0, stream>>>((const float *)x.at, (const float *)reference.at, count,
                                             (differences *)out.at);
        else
            compare<<<512, 256, 0, stream>>>((const T *)x.at, (const T *)reference.at, count,
                                             (differences *)out.at);
        check(cudaStreamSynchronize(stream), "compare");
        cudaMemcpy(&d, out.at, sizeof d, cudaMemcpyDeviceToHost);
        return d;
    }

    std::vector<double> read(const void *device, int64_t count)
    {
        std::vector<double> x(count);

        check(cudaMemcpy(x.data(), device, sizeof(double) * count, cudaMemcpyDeviceToHost), "copy");
        return x;
    }

    std::vector<double> picked(const block &tensor, bool like_o, bool of_keys)
    {
        block out(sizeof(double) * SAMPLES * r.head_dim);

        pick<T><<<SAMPLES, 128, 0, stream>>>(p, like_o, (const T *)tensor.at, of_keys ? p.seq_k : p.seq,
                                             (const int2 *)(of_keys ? samples_k : samples_q).at,
                                             (double *)out.at);
        check(cudaStreamSynchronize(stream), "pick");
        return read(out.at, SAMPLES * r.head_dim);
    }

    void judge(const char *name, const block &x, const block &again, const block &reference, int64_t count,
               const std::vector<double> &truth, bool like_o, bool of_keys)
    {
        const differences d = between(x, reference, count, false), twice = between(again, x, count, false);

        results.push_back({name, relative(picked(x, like_o, of_keys), truth),
                           relative(picked(reference, like_o, of_keys), truth),
                           std::sqrt(d.squares / (d.of_reference > 0 ? d.of_reference : 1)), d.not_finite,
                           twice.bits});
    }

    timing forward(td_flash_gpu on)
    {
        block x(o.bytes), x_lse(lse.bytes), y(o.bytes), y_lse(lse.bytes);
        block truth_o(sizeof(double) * SAMPLES * r.head_dim), truth_dq(truth_o.bytes),
            truth_lse(sizeof(double) * SAMPLES), work(sizeof(double) * SAMPLES * 2 * r.seq_k);

        run_forward(on, x, x_lse);
        run_forward(on, y, y_lse);
        sample_queries<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_q.at, (double *)work.at,
                                                           (double *)truth_o.at, (double *)truth_dq.at,
                                                           (double *)truth_lse.at);
        check(cudaStreamSynchronize(stream), "sample");
        judge("o", x, y, o, queries, read(truth_o.at, SAMPLES * r.head_dim), true, false);

        const differences d = between(x_lse, lse, rows, true), twice = between(y_lse, x_lse, rows, true);
        std::vector<float> mine(rows), reference(rows);
        cudaMemcpy(mine.data(), x_lse.at, lse.bytes, cudaMemcpyDeviceToHost);
        cudaMemcpy(reference.data(), lse.at, lse.bytes, cudaMemcpyDeviceToHost);
        std::vector<int2> some(SAMPLES);
        cudaMemcpy(some.data(), samples_q.at, samples_q.bytes, cudaMemcpyDeviceToHost);
        std::vector<double> truth = read(truth_lse.at, SAMPLES), a(SAMPLES), b(SAMPLES);
        for (int i = 0; i < SAMPLES; i++) {
            a[i] = mine[(int64_t)some[i].x * r.seq + some[i].y];
            b[i] = reference[(int64_t)some[i].x * r.seq + some[i].y];
        }
        results.push_back({"lse", relative(a, truth), relative(b, truth),
                           std::sqrt(d.squares / (d.of_reference > 0 ? d.of_reference : 1)), d.not_finite,
                           twice.bits});
        if (!r.timed)
            return {};
        block scratch(td_cuda_flash_forward_bytes(on, &shape));
        return time_of(stream, [&] { forward_call(on, x, x_lse, scratch); });
    }

    /** The largest error of a head. NaN is larger than all. */
    double2 worst_identities(const block &dq, const block &dk, const block &dv)
    {
        block out(sizeof(double2) * p.heads);
        double2 worst = {0, 0};

        identities<T><<<p.heads, THREADS, 0, stream>>>(p, (const T *)dq.at, (const T *)dk.at,
                                                       (const T *)dv.at, (double2 *)out.at);
        check(cudaStreamSynchronize(stream), "identities");
        const std::vector<double> all = read(out.at, 2 * p.heads);
        for (int i = 0; i < p.heads; i++) {
            worst.x = std::isnan(worst.x) || worst.x >= all[2 * i] ? worst.x : all[2 * i];
            worst.y = std::isnan(worst.y) || worst.y >= all[2 * i + 1] ? worst.y : all[2 * i + 1];
        }
        return worst;
    }

    timing backward(td_flash_gpu on)
    {
        block dq(queries * sizeof(T)), dk(keys * sizeof(T)), dv(keys * sizeof(T)), dq2(dq.bytes),
            dk2(dk.bytes), dv2(dv.bytes), dq0(dq.bytes), dk0(dk.bytes), dv0(dv.bytes);
        const int64_t longest = std::max(r.seq, r.seq_k);
        block truth_o(sizeof(double) * SAMPLES * r.head_dim), truth_dq(truth_o.bytes),
            truth_dk(truth_o.bytes), truth_dv(truth_o.bytes), truth_lse(sizeof(double) * SAMPLES),
            work(sizeof(double) * SAMPLES * 2 * longest);
        block scratch(td_cuda_flash_backward_bytes(on, &shape)),
            portable_scratch(td_cuda_flash_backward_bytes(portable, &shape));

        backward_call(portable, dq0, dk0, dv0, portable_scratch);
        backward_call(on, dq, dk, dv, scratch);
        check(cudaStreamSynchronize(stream), "backward");
        scratch.poison();
        backward_call(on, dq2, dk2, dv2, scratch);
        sample_queries<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_q.at, (double *)work.at,
                                                           (double *)truth_o.at, (double *)truth_dq.at,
                                                           (double *)truth_lse.at);
        sample_keys<T><<<SAMPLES, THREADS, 0, stream>>>(p, (const int2 *)samples_k.at, (double *)work.at,
                                                        (double *)truth_dk.at, (double *)truth_dv.at);
        check(cudaStreamSynchronize(stream), "backward");
        const int64_t count = SAMPLES * r.head_dim;
        judge("dq", dq, dq2, dq0, queries, read(truth_dq.at, count), false, false);
        judge("dk", dk, dk2, dk0, keys, read(truth_dk.at, count), false, true);
        judge("dv", dv, dv2, dv0, keys, read(truth_dv.at, count), false, true);
        const double2 mine = worst_identities(dq, dk, dv), judged = worst_identities(dq0, dk0, dv0);
        results.push_back({"<dO,O>", mine.x, judged.x, 0, 0, 0});
        results.push_back({"<dQ,Q>", mine.y, judged.y, 0, 0, 0});
        if (!r.timed)
            return {};
        return time_of(stream, [&] { backward_call(on, dq, dk, dv, scratch); });
    }
};

/** Whether two calls may differ in this output. */
bool may_change(const result &x)
{
    return x.name == "dq" && !deterministic;
}

/** Whether an output is right: no element is not finite, and the error is at most 1.5 times the portable
 * kernel's or below the rounding of the type. Two calls give the same bits, except for dq. */
bool right(const result &x, const row &r)
{
    const double rounding = x.name == "lse" ? 1e-6 : r.dtype == TD_BF16 ? 2e-3 : 3e-4;
    const bool one_key = r.seq_k == 1 || (r.seq == 1 && r.causal); /* dq and dk are 0 */

    if (x.not_finite || (x.changed && !may_change(x)))
        return false;
    if (x.name[0] == '<') /* 0.02 at most in rows of 512 to 16384 (H100, 2026-11-26) */
        return x.truth <= 0.1 || (one_key && x.name == "<dQ,Q>");
    return x.truth <= std::max(1.5 * x.judge, rounding) || (one_key && x.name[0] == 'd' && x.name != "dv");
}

/** Runs a unit and writes a line for the table and one of JSON, after a tab. */
void run_unit(int unit, td_flash_gpu gpu, cudaStream_t stream)
{
    const row &r = ROWS[unit / (PASSES * WAYS)];
    const int pass = unit / WAYS % PASSES, way = unit % WAYS;
    std::vector<result> results;
    timing time;

    if (way == 0)
        gpu.capability = 80;
    const auto run = [&](auto sample) {
        race<decltype(sample)> all(r, gpu, stream);
        time = pass ? all.backward(gpu) : all.forward(gpu);
        results = all.results;
    };
    if (r.dtype == TD_BF16)
        run(__nv_bfloat16());
    else
        run(__half());

    const double pairs = r.causal ? (double)r.seq * std::min(r.seq, r.seq_k) -
                                        std::pow((double)std::min(r.seq, r.seq_k), 2) / 2
                                  : (double)r.seq * r.seq_k;
    const double flop = (pass ? 10.0 : 4.0) * r.batch * r.heads * r.head_dim * pairs;
    bool good = true;
    std::string errors, json;
    char text[400];
    for (const result &x : results) {
        good = good && right(x, r);
        snprintf(text, sizeof text, " %s %.2e (%.2e, %.1e)%s", x.name.c_str(), x.truth, x.judge, x.against,
                 right(x, r)                   ? ""
                 : x.not_finite                ? " NAN"
                 : x.changed && !may_change(x) ? " CHANGES"
                                               : " WRONG");
        errors += text;
        snprintf(text, sizeof text, "%s\"%s\": {\"rel_l2\": %.3e, \"portable\": %.3e}",
                 json.empty() ? "" : ", ", x.name.c_str(), x.truth, x.judge);
        json += text;
    }
    printf("%-36s %-8s %-8s %9.1f us %5.0f TF %4d MHz %3.0f W %s%s\t", name_of(r).c_str(), PASS[pass],
           WAY[way], time.us, time.us > 0 ? flop / time.us * 1e-6 : 0, time.mhz, time.watts,
           good ? "ok" : "FAILED", errors.c_str());
    printf(
        "{\"shape\": \"%s\", \"pass\": \"%s\", \"impl\": \"%s\", \"us\": %.2f, \"mhz\": %d, \"watts\": %.0f, "
        "\"ok\": %s, \"errors\": {%s}}\n",
        name_of(r).c_str(), PASS[pass], WAY[way], time.us, time.mhz, time.watts, good ? "true" : "false",
        json.c_str());
    fflush(stdout);
}

/* ---- the watchdog ---- */

struct choice {
    const char *out = nullptr, *pass = nullptr;
    std::vector<const char *> words;
    bool only_timed = false, only_hopper = false;

    bool takes(int unit) const
    {
        const row &r = ROWS[unit / (PASSES * WAYS)];
        const std::string name = name_of(r);
        const bool named = std::any_of(words.begin(), words.end(), [&](const char *some) {
            return name.find(some) != std::string::npos;
        });

        return (!pass || strcmp(pass, PASS[unit / WAYS % PASSES]) == 0) && (words.empty() || named) &&
               (r.timed || !only_timed) && (unit % WAYS == 1 || (r.timed && !only_hopper));
    }
};

void child(int first, const choice &chosen)
{
    cudaDeviceProp properties;
    cudaStream_t stream;

    check(cudaGetDeviceProperties(&properties, 0), "device");
    check(cudaStreamCreate(&stream), "stream");
    const td_flash_gpu gpu = {properties.multiProcessorCount, 10 * properties.major + properties.minor, 0};
    for (int unit = first; unit < UNITS; unit++)
        if (chosen.takes(unit)) {
            printf("%d\n", unit);
            fflush(stdout);
            run_unit(unit, gpu, stream);
        }
    _exit(0);
}

} // namespace

int main(int argc, char **argv)
{
    choice chosen;
    FILE *json = nullptr;
    int failed = 0, lines = 0;

    for (int option; (option = getopt(argc, argv, "o:p:w:tnd")) != -1;)
        switch (option) {
        case 'o':
            chosen.out = optarg;
            break;
        case 'p':
            chosen.pass = optarg;
            break;
        case 'w':
            chosen.words.push_back(optarg);
            break;
        case 't':
            chosen.only_timed = true;
            break;
        case 'n':
            chosen.only_hopper = true;
            break;
        case 'd':
            deterministic = true;
            break;
        default:
            fprintf(stderr,
                    "usage: flash_race [-o FILE.json] [-p forward|backward] [-w WORDS]... [-t] [-n] [-d]\n");
            return 2;
        }
    if (chosen.out && !(json = fopen(chosen.out, "w"))) {
        perror(chosen.out);
        return 2;
    }
    for (int next = 0; next < UNITS;) {
        int ends[2], running = -1, status;
        std::string line;

        if (pipe(ends) != 0)
            return 2;
        const pid_t worker = fork();
        if (worker == 0) {
            dup2(ends[1], 1);
            close(ends[0]);
            child(next, chosen);
        }
        close(ends[1]);
        for (bool open = true; open;) {
            pollfd wait = {ends[0], POLLIN, 0};
            char c;

            if (poll(&wait, 1, 10000) == 0) {
                printf("no answer for 10 s: ");
                break;
            }
            open = read(ends[0], &c, 1) == 1;
            if (open && c != '\n') {
                line += c;
                continue;
            }
            const size_t tab = line.find('\t');
            if (tab != std::string::npos) {
                puts(line.substr(0, tab).c_str());
                failed += line.find("FAILED") < tab;
                if (json)
                    fprintf(json, "%s%s", lines++ ? ",\n" : "[", line.substr(tab + 1).c_str());
                running = -1;
            } else if (!line.empty() && line.find_first_not_of("0123456789") == std::string::npos)
                running = atoi(line.c_str());
            else if (!line.empty())
                puts(line.c_str());
            fflush(stdout);
            line.clear();
        }
        close(ends[0]);
        kill(worker, SIGKILL);
        waitpid(worker, &status, 0);
        failed += WIFEXITED(status) && WEXITSTATUS(status) != 0 && running < 0; /* no GPU, for one */
        next = UNITS;
        if (running >= 0) {
            failed++;
            next = running + 1;
            printf("%s %s %s: no result\n", name_of(ROWS[running / (PASSES * WAYS)]).c_str(),
                   PASS[running / WAYS % PASSES], WAY[running % WAYS]);
            fflush(stdout);
        }
    }
    if (json) {
        fputs("]\n", json);
        fclose(json);
    }
    printf("%d failed\n", failed);
    return failed ? 1 : 0;
}
