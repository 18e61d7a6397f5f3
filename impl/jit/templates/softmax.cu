/* The softmax of attention whose GEMMs run in cuBLASLt: P replaces the scores, dS replaces dP.
 * impl/jit/kernels.c puts the constants before this text, and NVRTC compiles it. f32, without a mask; one
 * block per row.
 *
 *   SEQ_K     columns, a multiple of 4      THREADS  of a block, a multiple of 32
 *   HEAD_DIM  columns of o and dout         SCALE    of the scores
 *   BACKWARD  0 or 1: which pass this is
 *
 * A thread has COUNT times four columns in registers, so that a row is read once and written once. */

typedef long long integer;

enum { FOURS = SEQ_K / 4, COUNT = (FOURS + THREADS - 1) / THREADS, WARPS = THREADS / 32 };

typedef struct arguments {
    float *scores;            /* [rows, SEQ_K]: forward S to P; backward P, which is read */
    float *dscores;           /* [rows, SEQ_K]: backward, dP to dS */
    const float *o_in, *dout; /* [rows, HEAD_DIM] */
} arguments;

#ifdef __CUDACC__
#define INLINE       static __device__ __forceinline__
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name(const arguments a)
#define SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define INFINITE     __int_as_float(0x7F800000)

INLINE int thread_index(void)
{
    return (int)threadIdx.x;
}

INLINE integer block_index(void)
{
    return (integer)blockIdx.x;
}

INLINE void block_barrier(void)
{
    __syncthreads();
}

INLINE float from_lane(float x, int mask)
{
    return __shfl_xor_sync(~0u, x, mask);
}

INLINE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#define INLINE static inline
#endif

/** exp(x), with log2(e) in two parts. The first is rounded down, so that -inf times the second is not NaN. */
INLINE float exp_of(float x)
{
    const float high = 0x1.715476p+0f, low = 0x1.4ae0bep-26f;

    return exp2_fast(fmaf(x, high, x * low));
}

/** Reduces the values of all threads of the block: by_max: the maximum, otherwise the sum. */
INLINE float of_block(float x, float *room, const int by_max)
{
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        const float other = from_lane(x, mask);
        x = by_max ? fmaxf(x, other) : x + other;
    }
    if (WARPS == 1)
        return x;
    block_barrier(); /* all threads have read the room */
    if (thread_index() % 32 == 0)
        room[thread_index() / 32] = x;
    block_barrier();
    x = room[0];
#pragma unroll
    for (int i = 1; i < WARPS; i++)
        x = by_max ? fmaxf(x, room[i]) : x + room[i];
    return x;
}

#if !BACKWARD
KERNEL(td_softmax_jit_forward)
{
    SHARED(memory);
    float4 *const row = (float4 *)(a.scores + block_index() * SEQ_K);
    float4 x[COUNT];
    float top = -INFINITE, base, sum = 0.0f, inverse;

#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + thread_index();

        x[i].x = x[i].y = x[i].z = x[i].w = -INFINITE;
        if (FOURS % THREADS == 0 || at < FOURS)
            x[i] = row[at];
        top = fmaxf(top, fmaxf(fmaxf(x[i].x, x[i].y), fmaxf(x[i].z, x[i].w)));
    }
    top = of_block(top, (float *)memory, 1);
    base = top == -INFINITE ? 0.0f : top; /* -inf - -inf would be NaN */
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i].x = exp_of(x[i].x - base), x[i].y = exp_of(x[i].y - base);
        x[i].z = exp_of(x[i].z - base), x[i].w = exp_of(x[i].w - base);
        sum += (x[i].x + x[i].y) + (x[i].z + x[i].w);
    }
    inverse = 1.0f / of_block(sum, (float *)memory, 0);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + thread_index();

        x[i].x *= inverse, x[i].y *= inverse, x[i].z *= inverse, x[i].w *= inverse;
        if (FOURS % THREADS == 0 || at < FOURS)
            row[at] = x[i];
    }
}

#else
/** dS = scale P (dP - rowsum(dO * O)). Each warp computes the sum itself, so that no warp waits. */
KERNEL(td_softmax_jit_backward)
{
    const float4 *const p_row = (const float4 *)(a.scores + block_index() * SEQ_K);
    float4 *const row = (float4 *)(a.dscores + block_index() * SEQ_K);
    const float *const o = a.o_in + block_index() * HEAD_DIM, *const dout = a.dout + block_index() * HEAD_DIM;
    float4 p[COUNT], x[COUNT];
    float delta = 0.0f;

#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + thread_index();

        if (FOURS % THREADS == 0 || at < FOURS) {
            p[i] = p_row[at];
            x[i] = row[at];
        }
    }
    for (int i = thread_index() % 32; i < HEAD_DIM; i += 32)
        delta = fmaf(o[i], dout[i], delta);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2)
        delta += from_lane(delta, mask);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int at = i * THREADS + thread_index();

        if (FOURS % THREADS == 0 || at < FOURS) {
            x[i].x = (float)SCALE * p[i].x * (x[i].x - delta),
            x[i].y = (float)SCALE * p[i].y * (x[i].y - delta);
            x[i].z = (float)SCALE * p[i].z * (x[i].z - delta),
            x[i].w = (float)SCALE * p[i].w * (x[i].w - delta);
            row[at] = x[i];
        }
    }
}
#endif
