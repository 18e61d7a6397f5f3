/** Comes before a template of jit/ for CUDA, so that a C compiler makes it run on the host. Each thread of a
 * block has a stack and runs until a barrier. CUDA's extensions follow its manual: shuffles, matrices from
 * shared memory, multiplication on tensor cores, asynchronous copies (done at once). emulate_end.h comes
 * after the template. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { EMULATED_MOST = 512, EMULATED_STACK = 128 << 10 };

typedef struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
} float4;

typedef struct __attribute__((aligned(8))) float2 {
    float x, y;
} float2;

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define KERNEL(name)    void name(const arguments a)
#define SHARED(name)    unsigned char *const name = emulated_shared
#define INFINITE        __builtin_inff()

static ucontext_t emulated_home, emulated[EMULATED_MOST];
static int emulated_threads, emulated_now, emulated_done[EMULATED_MOST], emulated_left;
static int emulated_block_waits, emulated_block_turn, emulated_warp_waits[EMULATED_MOST / 32],
    emulated_warp_turn[EMULATED_MOST / 32];
static long long emulated_block;
static unsigned char *emulated_shared;
static unsigned emulated_slots[EMULATED_MOST][4];
static const unsigned char *emulated_rows[EMULATED_MOST];

/** Switches to the next thread that has not ended. */
static void emulated_yield(void)
{
    const int from = emulated_now;

    do
        emulated_now = (emulated_now + 1) % emulated_threads;
    while (emulated_done[emulated_now]);
    if (emulated_now != from)
        swapcontext(&emulated[from], &emulated[emulated_now]);
}

static int thread_index(void)
{
    return emulated_now;
}

static long long block_index(void)
{
    return emulated_block;
}

static void emulated_wait(int *waits, int *turn, int all)
{
    const int mine = *turn;

    if (++*waits == all) {
        *waits = 0;
        ++*turn;
    }
    while (*turn == mine)
        emulated_yield();
}

static void block_barrier(void)
{
    emulated_wait(&emulated_block_waits, &emulated_block_turn, emulated_threads);
}

static void warp_barrier(void)
{
    emulated_wait(&emulated_warp_waits[emulated_now / 32], &emulated_warp_turn[emulated_now / 32], 32);
}

static float from_lane(float x, int mask)
{
    float y;

    memcpy(emulated_slots[emulated_now], &x, sizeof x);
    warp_barrier();
    memcpy(&y, emulated_slots[emulated_now ^ mask], sizeof y);
    warp_barrier();
    return y;
}

static float exp2_fast(float x)
{
    return x < -126 ? 0 : exp2f(x);
}

static void copy16(void *dst, const void *src, int wanted)
{
    if (((size_t)dst | (wanted ? (size_t)src : 0)) % 16 != 0)
        abort();
    if (wanted)
        memcpy(dst, src, 16);
    else
        memset(dst, 0, 16);
}

static void copies_wait(void)
{
}

static unsigned bits_of(const unsigned char *row, int column)
{
    unsigned short bits;

    memcpy(&bits, row + 2 * column, sizeof bits);
    return bits;
}

/** Lane l names row l % 8 of matrix l / 8, and gets two values of each matrix. */
static void emulated_load(unsigned x[4], const void *row, int transposed)
{
    const int lane = emulated_now % 32, warp = emulated_now - lane;

    if ((size_t)row % 16 != 0)
        abort();
    emulated_rows[emulated_now] = row;
    warp_barrier();
    for (int i = 0; i < 4; i++) {
        const unsigned char *const *const rows = emulated_rows + warp + 8 * i;
        const int at = lane / 4, two = lane % 4 * 2;

        x[i] = transposed ? bits_of(rows[two], at) | bits_of(rows[two + 1], at) << 16
                          : bits_of(rows[at], two) | bits_of(rows[at], two + 1) << 16;
    }
    warp_barrier();
}

static void load_matrices(unsigned x[4], const void *row)
{
    emulated_load(x, row, 0);
}

static void load_transposed(unsigned x[4], const void *row)
{
    emulated_load(x, row, 1);
}

static float widen_bits(unsigned bits)
{
    const unsigned wide = bits << 16;
    float x;

    memcpy(&x, &wide, sizeof x);
    return x;
}

/** Rounds to nearest even; NaN stays one. */
static unsigned emulated_narrow(float x)
{
    unsigned wide;

    memcpy(&wide, &x, sizeof wide);
    if (x != x)
        return wide >> 16 | 0x40;
    return (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
}

static unsigned pack(float low, float high)
{
    return emulated_narrow(low) | emulated_narrow(high) << 16;
}

/** Register i of A has row g + 8 (i % 2) and columns 2t + 8 (i / 2) on; of B, rows 2t + 8 i on of column
 * g. */
static void multiply_tile(float *top, float *low, const unsigned a[4], unsigned b0, unsigned b1)
{
    static unsigned b[EMULATED_MOST][2];
    const int lane = emulated_now % 32, warp = emulated_now - lane, g = lane / 4, t = lane % 4;

    memcpy(emulated_slots[emulated_now], a, sizeof emulated_slots[0]);
    b[emulated_now][0] = b0, b[emulated_now][1] = b1;
    warp_barrier();
    for (int half = 0; half < 2; half++)
        for (int e = 0; e < 2; e++) {
            float sum = half ? low[e] : top[e];

            for (int k = 0; k < 16; k++) {
                const unsigned left = emulated_slots[warp + 4 * g + k % 8 / 2][half + k / 8 * 2];
                const unsigned right = b[warp + 4 * (2 * t + e) + k % 8 / 2][k / 8];

                sum += widen_bits(left >> k % 2 * 16 & 0xFFFF) * widen_bits(right >> k % 2 * 16 & 0xFFFF);
            }
            (half ? low : top)[e] = sum;
        }
    warp_barrier();
}

static void add_one(float *to, float x)
{
    *to += x;
}

static void add_four(float *to, const float x[4])
{
    if ((size_t)to % 16 != 0)
        abort();
    for (int i = 0; i < 4; i++)
        to[i] += x[i];
}
