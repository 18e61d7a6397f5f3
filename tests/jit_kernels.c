/* The kernels of jit/ for CUDA, run by the C compiler on the host (support/emulate.h). Every kind of tile is
 * tested without a GPU. */
#include "attention/attention.h"
#include "attention/shape.h"
#include "jit/compiler.h"
#include "jit/kernels.h"
#include "jit/nvrtc.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <dlfcn.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static td_compiler compiler;
static char script[64]; /* the path of the script that calls the compiler */
/* test_jit_kernels few: tests fewer kernels of each kind, and fewer sources with NVRTC */
static bool few;

/* ---- a piece of the source as a library of the host ---- */

typedef struct piece {
    void *handle;
    int file; /* stays open, because the loader knows a library by its file's name */
    int (*emulate)(void (*kernel)(void), long long blocks, int threads, int bytes, const void *given);
} piece;

static piece build(const char *text)
{
    td_code code;
    char path[48];
    piece p;

    td_assert_ok(td_compiler_build(&compiler, text, &code));
    p.file = memfd_create("emulated", MFD_CLOEXEC);
    assert_int_equal(write(p.file, code.data, code.bytes), (ssize_t)code.bytes);
    td_code_free(&code);
    snprintf(path, sizeof path, "/proc/self/fd/%d", p.file);
    p.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!p.handle)
        fail_msg("%s", dlerror());
    *(void **)&p.emulate = dlsym(p.handle, "emulate");
    assert_non_null(p.emulate);
    return p;
}

static void unload(piece *p)
{
    dlclose(p->handle);
    close(p->file);
}

/** Builds the source of a pass for this machine. */
static piece build_pass(const td_attention_shape *s, bool backward)
{
    char *const source = td_jit_kernels_source(s, backward);
    char *text = NULL;

    assert_non_null(source);
    assert_true(asprintf(&text, "#include \"%s/emulate.h\"\n%s\n#include \"%s/emulate_end.h\"\n", SUPPORT,
                         source, SUPPORT) > 0);
    const piece p = build(text);
    free(text);
    free(source);
    return p;
}

static void run(const piece *p, const char *name, int64_t blocks, const td_jit_tiling *t, const void *given)
{
    void (*kernel)(void);

    *(void **)&kernel = dlsym(p->handle, name);
    assert_non_null(kernel);
    assert_int_equal(p->emulate(kernel, blocks, t->threads, t->bytes, given), 0);
}

/* ---- attention in float64 ---- */

typedef struct problem {
    td_attention_shape s;
    int64_t queries, keys, rows; /* elements of q and of k, and queries of all heads */
    double *q, *k, *v, *dout, *o, *dq, *dk, *dv;
    void *given[4];   /* q, k, v, dout in dtype */
    void *results[4]; /* o, dq, dk, dv */
    float *max, *inverse, *delta;
} problem;

static double *zeros(int64_t count)
{
    double *x = calloc((size_t)count, sizeof *x);

    assert_non_null(x);
    return x;
}

/** Draws a tensor of dtype. Returns its values in float64. */
static double *draw(problem *p, int which, int64_t count)
{
    const size_t bytes = (size_t)count * td_dtype_size(p->s.dtype);
    void *const drawn = td_draw_normal("jit kernels", (uint64_t)which, p->s.dtype, count);

    p->given[which] = aligned_alloc(16, (bytes + 15) / 16 * 16);
    assert_non_null(p->given[which]);
    memcpy(p->given[which], drawn, bytes);
    td_fence_free(drawn);
    return td_as_f64(p->s.dtype, p->given[which], count);
}

static float *draw_floats(uint64_t stream, int64_t count)
{
    void *const drawn = td_draw_normal("jit softmax", stream, TD_F32, count);
    float *const x = aligned_alloc(16, ((size_t)count * sizeof *x + 15) / 16 * 16);

    assert_non_null(x);
    memcpy(x, drawn, (size_t)count * sizeof *x);
    td_fence_free(drawn);
    return x;
}

static int64_t o_index(const td_attention_shape *s, int64_t head, int64_t row)
{
    return td_attention_o_start(s, head) + row * td_attention_o_pitch(s);
}

static void solve(problem *p)
{
    const td_attention_shape *const s = &p->s;
    const int64_t d = s->head_dim;
    double *const weights = zeros(s->seq_k), *const dp = zeros(s->seq_k);

    for (int64_t head = 0; head < s->batch * s->heads; head++)
        for (int64_t i = 0; i < s->seq; i++) {
            const double *const q = p->q + (head * s->seq + i) * d;
            const double *const dout = p->dout + o_index(s, head, i);
            double *const o = p->o + o_index(s, head, i), *const dq = p->dq + (head * s->seq + i) * d;
            const int64_t seen = s->causal && i + 1 < s->seq_k ? i + 1 : s->seq_k;
            double most = -INFINITY, sum = 0, dot = 0;

            for (int64_t j = 0; j < seen; j++) {
                const double *const k = p->k + (head * s->seq_k + j) * d;
                double score = 0;
                for (int64_t c = 0; c < d; c++)
                    score += q[c] * k[c];
                weights[j] = score * (double)s->scale;
                most = fmax(most, weights[j]);
            }
            for (int64_t j = 0; j < seen; j++)
                sum += weights[j] = exp(weights[j] - most);
            for (int64_t j = 0; j < seen; j++) {
                const double *const v = p->v + (head * s->seq_k + j) * d;
                weights[j] /= sum;
                dp[j] = 0;
                for (int64_t c = 0; c < d; c++) {
                    o[c] += weights[j] * v[c];
                    dp[j] += dout[c] * v[c];
                }
                dot += weights[j] * dp[j];
            }
            for (int64_t j = 0; j < seen; j++) {
                const int64_t key = (head * s->seq_k + j) * d;
                const double ds = weights[j] * (dp[j] - dot) * (double)s->scale;
                for (int64_t c = 0; c < d; c++) {
                    dq[c] += ds * p->k[key + c];
                    p->dk[key + c] += ds * q[c];
                    p->dv[key + c] += weights[j] * dout[c];
                }
            }
        }
    free(weights);
    free(dp);
}

static problem make(const td_attention_shape *shape)
{
    problem p;

    memset(&p, 0, sizeof p);
    td_assert_ok(td_attention_shape_resolve(shape, &p.s));
    p.rows = p.s.batch * p.s.heads * p.s.seq;
    p.queries = p.rows * p.s.head_dim;
    p.keys = p.s.batch * p.s.heads * p.s.seq_k * p.s.head_dim;
    p.q = draw(&p, 0, p.queries), p.k = draw(&p, 1, p.keys), p.v = draw(&p, 2, p.keys);
    p.dout = draw(&p, 3, p.queries);
    p.o = zeros(p.queries), p.dq = zeros(p.queries), p.dk = zeros(p.keys), p.dv = zeros(p.keys);
    for (int i = 0; i < 4; i++) {
        const size_t bytes = (size_t)(i < 2 ? p.queries : p.keys) * td_dtype_size(p.s.dtype);
        p.results[i] = aligned_alloc(16, (bytes + 31) / 16 * 16);
        memset(p.results[i], 0xFF, bytes);
    }
    p.max = malloc(3 * (size_t)p.rows * sizeof *p.max);
    p.inverse = p.max + p.rows;
    p.delta = p.inverse + p.rows;
    memset(p.max, 0xFF, 3 * (size_t)p.rows * sizeof *p.max);
    solve(&p);
    return p;
}

static void unmake(problem *p)
{
    double *const all[] = {p->q, p->k, p->v, p->dout, p->o, p->dq, p->dk, p->dv};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    for (int i = 0; i < 4; i++) {
        free(p->given[i]);
        free(p->results[i]);
    }
    free(p->max);
}

static void assert_results(const problem *p, int from, int to, const char *how)
{
    static const char *const names[] = {"o", "dq", "dk", "dv"};
    const double *const truths[] = {p->o, p->dq, p->dk, p->dv};
    char name[64];

    for (int i = from; i < to; i++) {
        snprintf(name, sizeof name, "%s, %s", names[i], how);
        td_assert_close(name, p->s.dtype, p->results[i], truths[i], i < 2 ? p->queries : p->keys,
                        p->s.dtype == TD_F32 ? 2e-6 : 1e-2);
    }
}

/* ---- the cases ---- */

static int64_t tiles_of(int64_t extent, const td_jit_tiling *t)
{
    return (extent + t->rows - 1) / t->rows;
}

/** Runs forward, and backward in both ways: blocks of keys add to dQ, or blocks of queries compute dQ. */
static void attend(const td_attention_shape *shape, int aligned)
{
    problem p = make(shape);
    const td_jit_kernels k = td_jit_kernels_of(&p.s);
    const int64_t heads = p.s.batch * p.s.heads;
    td_jit_arguments a = {.q = p.given[0],
                          .k = p.given[1],
                          .v = p.given[2],
                          .dout = p.given[3],
                          .o_in = p.results[0],
                          .o = p.results[0],
                          .dq = p.results[1],
                          .dk = p.results[2],
                          .dv = p.results[3],
                          .max = p.max,
                          .inverse = p.inverse,
                          .delta = p.delta,
                          .heads = p.s.o_bshd ? (int)p.s.heads : 1,
                          .aligned = aligned};

    assert_false(k.with_gemm);
    piece forward = build_pass(&p.s, false), backward = build_pass(&p.s, true);
    run(&forward, "td_attention_jit_forward", heads * tiles_of(p.s.seq, &k.forward), &k.forward, &a);
    assert_results(&p, 0, 1, "forward");
    for (int adds = 0; adds <= (p.s.dtype == TD_F32); adds++) {
        const int64_t queries = heads * tiles_of(p.s.seq, &k.backward);

        for (int i = 1; i < 4; i++)
            memset(p.results[i], 0xFF, (size_t)(i < 2 ? p.queries : p.keys) * td_dtype_size(p.s.dtype));
        memset(p.delta, 0xFF, (size_t)p.rows * sizeof *p.delta);
        a.add_dq = adds;
        run(&backward, adds ? "td_attention_jit_prepare" : "td_attention_jit_backward_queries", queries,
            &k.backward, &a);
        run(&backward, "td_attention_jit_backward_keys", heads * tiles_of(p.s.seq_k, &k.backward),
            &k.backward, &a);
        assert_results(&p, 1, 4, adds ? "added to" : "by queries");
    }
    unload(&forward);
    unload(&backward);
    unmake(&p);
}

TD_TEST(attention_agrees_with_float64)
{
    /* Lengths: one tile, both sides of a tile, several tiles and a part. Every width of the outputs. Numbers
     * of keys other than queries. */
    static const td_attention_shape shapes[] = {
        {.batch = 1, .heads = 2, .seq = 40, .head_dim = 16},
        {.batch = 2, .heads = 1, .seq = 65, .head_dim = 64, .causal = true},
        {.batch = 1, .heads = 1, .seq = 270, .seq_k = 33, .head_dim = 32},
        {.batch = 1, .heads = 1, .seq = 33, .seq_k = 130, .head_dim = 80, .causal = true},
        {.batch = 1, .heads = 1, .seq = 97, .head_dim = 128, .causal = true},
        {.batch = 2, .heads = 3, .seq = 17, .head_dim = 24, .causal = true, .o_bshd = true},
        {.batch = 1, .heads = 2, .seq = 5, .seq_k = 1, .head_dim = 48},
        {.batch = 1,
         .heads = 1,
         .seq = 9,
         .head_dim = 7,
         .scale = 0.1118034f, /* six digits would be wrong by 4e-6 */
         .causal = true,
         .mask = TD_MASK_ADD_1E6},
    };

    for (size_t i = 0; i < (few ? 2 : sizeof shapes / sizeof *shapes); i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            td_attention_shape shape = shapes[i];

            shape.dtype = bf16 ? TD_BF16 : TD_F32;
            attend(&shape, i % 3 != 1);
        }
}

/* Long sequences have the largest tiles. One head of 2,000 queries has the same tiles as one of a million. */
TD_TEST(the_largest_tiles_give_the_same)
{
    td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 1990, .seq_k = 70, .dtype = TD_F32};

    for (int64_t head_dim = 16; head_dim <= (few ? 16 : 64); head_dim *= 2) {
        shape.head_dim = head_dim;
        attend(&shape, 1);
    }
}

TD_TEST(the_softmax_between_gemms_agrees_with_float64)
{
    static const int64_t columns[] = {256, 1024, 2052, 16384};

    for (size_t i = 0; i < (few ? 1 : sizeof columns / sizeof *columns); i++) {
        enum { ROWS = 3, WIDTH = 50 };
        const int64_t cols = columns[i], count = ROWS * cols;
        td_attention_shape s,
            given = {.batch = 1, .heads = 1, .seq = 1 << 20, .head_dim = WIDTH, .dtype = TD_F32};
        float *const p = draw_floats(1, count), *const dp = draw_floats(2, count);
        float *const o = draw_floats(3, ROWS * WIDTH), *const dout = draw_floats(4, ROWS * WIDTH);
        double *const p_truth = zeros(count), *const ds_truth = zeros(count);

        given.seq_k = cols;
        td_assert_ok(td_attention_shape_resolve(&given, &s));
        const td_jit_kernels k = td_jit_kernels_of(&s);
        assert_true(k.with_gemm);
        for (int row = 0; row < ROWS; row++) {
            double sum = 0, dot = 0;

            for (int64_t j = row * cols; j < (row + 1) * cols; j++)
                sum += p_truth[j] = exp((double)p[j]);
            for (int c = 0; c < WIDTH; c++)
                dot += (double)o[row * WIDTH + c] * (double)dout[row * WIDTH + c];
            for (int64_t j = row * cols; j < (row + 1) * cols; j++) {
                p_truth[j] /= sum;
                ds_truth[j] = (double)s.scale * p_truth[j] * ((double)dp[j] - dot);
            }
        }
        piece forward = build_pass(&s, false), backward = build_pass(&s, true);
        const td_jit_softmax_arguments a = {.scores = p, .dscores = dp, .o_in = o, .dout = dout};
        const td_jit_tiling t = {.threads = k.softmax_threads, .bytes = TD_JIT_SOFTMAX_BYTES};
        run(&forward, "td_softmax_jit_forward", ROWS, &t, &a);
        td_assert_close("p", TD_F32, p, p_truth, count, 1e-6);
        run(&backward, "td_softmax_jit_backward", ROWS, &t, &a);
        td_assert_close("ds", TD_F32, dp, ds_truth, count, 1e-6);
        unload(&forward);
        unload(&backward);
        free(p);
        free(dp);
        free(o);
        free(dout);
        free(p_truth);
        free(ds_truth);
    }
}

TD_TEST(tiles_fit_a_block)
{
    for (int64_t head_dim = 1; head_dim <= TD_JIT_CUDA_HEAD_DIM; head_dim++)
        for (int bf16 = 0; bf16 < 2; bf16++)
            for (int64_t seq = 1; seq < 100000; seq = seq * 3 + 1) {
                const td_attention_shape given = {.batch = 1,
                                                  .heads = 1,
                                                  .seq = seq,
                                                  .head_dim = head_dim,
                                                  .causal = true,
                                                  .dtype = bf16 ? TD_BF16 : TD_F32};
                td_attention_shape s;

                td_assert_ok(td_attention_shape_resolve(&given, &s));
                const td_jit_kernels k = td_jit_kernels_of(&s);
                /* two blocks fit on an SM */
                assert_true(k.forward.bytes <= 113 << 10 && k.backward.bytes <= 113 << 10);
                assert_true(k.forward.threads % 32 == 0 && k.forward.rows % 16 == 0);
            }
}

/* ---- NVRTC, which needs no GPU ---- */

TD_TEST(nvrtc_takes_every_source)
{
    static const int capabilities[] = {80, 90};
    td_nvrtc nvrtc;

    if (td_nvrtc_find(NULL, 90, &nvrtc) != TD_OK) {
        print_message("%s\n", td_last_error());
        skip();
    }
    assert_int_equal(strncmp(nvrtc.version, "NVRTC 1", 7), 0);
    for (int i = 0; i < 2; i++) {
        char identity[sizeof nvrtc.identity];

        memcpy(identity, nvrtc.identity, sizeof identity);
        td_assert_ok(td_nvrtc_find(nvrtc.path, capabilities[i], &nvrtc));
        assert_string_not_equal(identity, nvrtc.identity); /* the capabilities are 90, 80, 90 in turn */
        /* Each source is compiled for one capability, and each capability gets every pair of tile, dtype
         * and pass. */
        for (int each = 0; each < 8; each++) {
            if (__builtin_parity((unsigned)each) != i || (few && each % 4 >= 2))
                continue;
            const td_attention_shape given = {.batch = 1,
                                              .heads = 1,
                                              .seq = 1024,
                                              .head_dim = each % 4 < 2 ? 80 : 64,
                                              .causal = each % 4 < 2,
                                              .dtype = each % 2 ? TD_BF16 : TD_F32};
            const bool backward = each >= 4;
            td_attention_shape s;
            td_code code;

            td_assert_ok(td_attention_shape_resolve(&given, &s));
            char *const source = td_jit_kernels_source(&s, backward);
            assert_non_null(source);
            td_assert_ok(td_nvrtc_build(&nvrtc, source, &code));
            assert_true(code.bytes > 1000 && memcmp(code.data, "\177ELF", 4) == 0);
            const char *const pass = backward ? "jit_backward" : "jit_forward";
            const char *const other = backward ? "jit_forward" : "jit_backward";
            assert_non_null(memmem(code.data, code.bytes, pass, strlen(pass)));
            assert_null(memmem(code.data, code.bytes, other, strlen(other)));
            td_code_free(&code);
            free(source);
        }
    }
    td_code code;
    td_assert_refused(td_nvrtc_build(&nvrtc, "no C++ at all\n", &code), TD_LIBRARY_ERROR, "error: ");
    td_assert_ok(td_nvrtc_find(NULL, 1, &nvrtc));
    td_assert_refused(td_nvrtc_build(&nvrtc, "int x;\n", &code), TD_LIBRARY_ERROR,
                      "NVRTC_ERROR_INVALID_OPTION");
}

TD_TEST(nvrtc_that_is_missing_is_an_error)
{
    td_nvrtc nvrtc;

    td_assert_refused(td_nvrtc_find("/no/such/libnvrtc.so", 90, &nvrtc), TD_LIBRARY_ERROR,
                      "/no/such/libnvrtc.so");
    td_assert_refused(td_nvrtc_find("libm.so.6", 90, &nvrtc), TD_LIBRARY_ERROR, "has no nvrtcVersion");
}

/** Finds the system's compiler. It compiles with few optimizations, because that is faster. */
static int find_compiler(void **state)
{
    static const char text[] = "#!/bin/sh\nexec cc \"$@\" -O1\n";
    char path[] = "/tmp/tandem-test-cc-XXXXXX";
    const int file = mkstemp(path);

    (void)state;
    if (file < 0 || write(file, text, sizeof text - 1) != (ssize_t)sizeof text - 1 || fchmod(file, 0700) != 0)
        return -1;
    close(file);
    const td_status status = td_compiler_find(path, NULL, &compiler);
    snprintf(script, sizeof script, "%s", path);
    return status == TD_OK ? 0 : -1;
}

static int lose_compiler(void **state)
{
    (void)state;
    td_compiler_deinit(&compiler);
    return unlink(script);
}

int main(int argc, char **argv)
{
    few = argc > 1 && strcmp(argv[1], "few") == 0;
    return td_run_tests("jit, kernels", find_compiler, lose_compiler);
}
