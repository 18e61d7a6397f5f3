#include "jit/kernels.h"

#include "base/format.h"
#include "jit/templates.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { GROUP = 16, MOST_SOFTMAX_THREADS = 512 };

/* Number of tiles that a head should have: with the handout's 8 heads they fill the 132 SMs of an H100 or
 * H200. Shorter sequences get smaller tiles, down to 16 rows. */
enum { ENOUGH_TILES = 16 };

/* cuBLASLt runs the GEMMs without a mask, from this many scores per head and these widths: the f32 GEMMs of
 * both are limited by the same CUDA cores, and the tiled backward would need a fifth GEMM. The widest heads
 * have the fewest threads per tile, so cuBLASLt is faster from fewer scores on. */
enum { PRODUCTS_HEAD_DIM = 48, WIDEST_HEAD_DIM = 96 };
#define PRODUCTS_SCORES        ((int64_t)1 << 20)
#define WIDEST_PRODUCTS_SCORES ((int64_t)1 << 16)

/* Most columns of a row that a block keeps in registers: 32 per thread. */
enum { MOST_COLUMNS = 32 * MOST_SOFTMAX_THREADS };

static int depth_of(const td_attention_shape *s)
{
    return (int)((s->head_dim + GROUP - 1) / GROUP) * GROUP;
}

/** A tiling with at most `rows` rows of a side that has `extent` rows. */
static td_jit_tiling tiling_of(const td_attention_shape *s, int64_t extent, int rows, int others, int kept)
{
    const int element = (int)td_dtype_size(s->dtype), pitch = depth_of(s) + 16 / element;
    td_jit_tiling t = {.rows = rows, .others = others};

    while (t.rows > GROUP && extent <= (int64_t)t.rows * (ENOUGH_TILES - 1))
        t.rows /= 2;
    t.threads = s->dtype == TD_F32 ? 128 : 2 * t.rows;
    t.bytes = (kept * t.rows + 2 * others) * pitch * element;
    if (kept > 1) /* max, inverse and delta of a tile's queries */
        t.bytes += 3 * others * (int)sizeof(float);
    if (s->dtype == TD_F32) /* scores, which the threads of a row share */
        t.bytes += t.rows * (others + 8) * (int)sizeof(float);
    return t;
}

static bool uses_gemm(const td_attention_shape *s)
{
    const int64_t least = s->head_dim >= WIDEST_HEAD_DIM ? WIDEST_PRODUCTS_SCORES : PRODUCTS_SCORES;

    return s->dtype == TD_F32 && !s->causal && !s->o_bshd && s->head_dim >= PRODUCTS_HEAD_DIM &&
           s->seq_k % 4 == 0 && s->seq_k <= MOST_COLUMNS && s->seq * s->seq_k >= least;
}

/* f32: 8 x 8 scores per thread need 16 reads of shared memory for 256 multiplications; 4 x 8 scores need 24.
 * More accumulators than these would not fit into 255 registers. bf16: a warp has 16 rows. */
td_jit_kernels td_jit_kernels_of(const td_attention_shape *s)
{
    const int depth = depth_of(s);
    const bool f32 = s->dtype == TD_F32;
    td_jit_kernels k = {.with_gemm = uses_gemm(s)};

    if (k.with_gemm) {
        const int64_t threads = (s->seq_k / GROUP + 31) / 32 * 32;

        k.softmax_threads = threads < MOST_SOFTMAX_THREADS ? (int)threads : MOST_SOFTMAX_THREADS;
        return k;
    }
    k.forward = tiling_of(s, s->seq, f32 && depth <= 64 ? 128 : 64, f32 && depth > 64 ? 32 : 64, 1);
    k.backward = tiling_of(s, s->seq > s->seq_k ? s->seq : s->seq_k, f32 && depth <= 32 ? 128 : 64,
                           depth > 64 ? 32 : 64, 2);
    return k;
}

/** scale * log2(e) in two parts of f32, high (rounded down) + low. Both are positive, so that an infinite
 * score keeps its sign. */
static void split_scale(double scale, float *high, float *low)
{
    const double whole = scale * 1.4426950408889634;

    *high = (float)whole;
    if ((double)*high >= whole)
        *high = nextafterf(*high, 0.0f);
    *low = (float)(whole - (double)*high);
}

static char *softmax_source(const td_attention_shape *s, const td_jit_kernels *k, bool backward)
{
    return td_format(
        "#define SEQ_K %" PRId64 "\n#define HEAD_DIM %" PRId64 "\n#define THREADS %d\n#define SCALE "
        "%a\n#define BACKWARD %d\n#line 1 \"softmax.cu\"\n%s",
        s->seq_k, s->head_dim, k->softmax_threads, (double)s->scale, backward, td_jit_template_softmax);
}

char *td_jit_kernels_source(const td_attention_shape *s, bool backward)
{
    const td_jit_kernels k = td_jit_kernels_of(s);
    const td_jit_tiling *const t = backward ? &k.backward : &k.forward;
    float high, low;

    if (k.with_gemm)
        return softmax_source(s, &k, backward);
    split_scale((double)s->scale, &high, &low);
    return td_format(
        "#define SEQ %" PRId64 "\n#define SEQ_K %" PRId64 "\n#define HEAD_DIM %" PRId64
        "\n#define CAUSAL %d\n#define ADD_1E6 %d\n#define SCALE %a\n#define HIGH %af\n#define LOW "
        "%af\n#define BF16 %d\n#define DEPTH %d\n#define ROWS %d\n#define OTHERS %d\n#define BACKWARD "
        "%d\n#line 1 \"cuda.cu\"\n%s",
        s->seq, s->seq_k, s->head_dim, s->causal, s->mask == TD_MASK_ADD_1E6, (double)s->scale, (double)high,
        (double)low, s->dtype == TD_BF16, depth_of(s), t->rows, t->others, backward, td_jit_template_cuda);
}
