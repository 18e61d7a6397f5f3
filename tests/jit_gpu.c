#include "support/attention_kit.h"

#include "jit/jit.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/gpu.h"
#include "support/test.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

static td_device *gpu;
static char folder[] = "/tmp/tandem-test-jit-gpu-XXXXXX"; /* the folder of compiled code */

/* ---- a shape on the GPU ---- */

enum { Q, K, V, DOUT, O, DQ, DK, DV, SAVED, FORWARD_WORK, BACKWARD_WORK, BLOCKS };

typedef struct run {
    td_attend_run host; /* the inputs, in the form that the kit's truth needs */
    void *blocks[BLOCKS];
    size_t bytes[BLOCKS], shift;
} run;

/** Every tensor starts `skip` elements after the start of its block. */
static run open_run(const char *name, const td_attention_shape *shape, size_t skip)
{
    run r = {.host = {.impl = &td_attention_jit, .shape = *shape},
             .shift = skip * td_dtype_size(shape->dtype)};
    td_attend_run *const h = &r.host;
    td_attention_sizes sizes;

    if (h->shape.seq_k == 0)
        h->shape.seq_k = shape->seq;
    h->rows = shape->batch * shape->heads * shape->seq;
    h->queries = h->rows * shape->head_dim;
    h->keys = shape->batch * shape->heads * h->shape.seq_k * shape->head_dim;
    h->q = td_draw_normal(name, 1, shape->dtype, h->queries);
    h->k = td_draw_normal(name, 2, shape->dtype, h->keys);
    h->v = td_draw_normal(name, 3, shape->dtype, h->keys);
    h->dout = td_draw_normal(name, 4, shape->dtype, h->queries);
    td_assert_ok(td_jit_sizes(gpu, shape, &sizes));

    const void *const given[BLOCKS] = {h->q, h->k, h->v, h->dout};
    for (int i = 0; i < BLOCKS; i++) {
        const bool of_keys = i == K || i == V || i == DK || i == DV;

        r.bytes[i] = (size_t)(of_keys ? h->keys : h->queries) * td_dtype_size(shape->dtype);
        if (i >= SAVED)
            r.bytes[i] = i == SAVED          ? sizes.saved
                         : i == FORWARD_WORK ? sizes.forward_work
                                             : sizes.backward_work;
        r.blocks[i] = td_gpu_block(gpu, NULL, r.bytes[i] + (i < SAVED ? r.shift : 0));
        if (given[i])
            td_assert_ok(td_device_upload(gpu, (char *)r.blocks[i] + r.shift, given[i], r.bytes[i]));
    }
    return r;
}

static void close_run(run *r)
{
    for (int i = 0; i < BLOCKS; i++)
        td_gpu_free(gpu, r->blocks[i]);
    td_fence_free(r->host.q);
    td_fence_free(r->host.k);
    td_fence_free(r->host.v);
    td_fence_free(r->host.dout);
}

static void *at(const run *r, int block)
{
    return (char *)r->blocks[block] + (block < SAVED ? r->shift : 0);
}

static td_status go(const run *r)
{
    const td_attention_shape *const s = &r->host.shape;
    const td_status status =
        td_jit_forward(gpu, s, at(r, Q), at(r, K), at(r, V), at(r, O), at(r, SAVED), at(r, FORWARD_WORK));

    return status != TD_OK
               ? status
               : td_jit_backward(gpu, s, at(r, Q), at(r, K), at(r, V), at(r, O), at(r, DOUT), at(r, SAVED),
                                 at(r, DQ), at(r, DK), at(r, DV), at(r, BACKWARD_WORK));
}

/** Reads the tensor of a block. The elements before it must still be poison. */
static void *fetch(const run *r, int block)
{
    unsigned char *const data = td_gpu_read(gpu, r->blocks[block], r->bytes[block] + r->shift);

    for (size_t i = 0; i < r->shift; i++)
        assert_int_equal(data[i], 0xFF);
    memmove(data, data + r->shift, r->bytes[block]);
    return data;
}

static void assert_near(const run *r, const td_attend_truth *truth)
{
    static const char *const names[] = {"o", "dq", "dk", "dv"};
    const double *const truths[] = {truth->o, truth->dq, truth->dk, truth->dv};
    const td_attention_shape *const s = &r->host.shape;

    for (int i = O; i <= DV; i++) {
        void *const data = fetch(r, i);
        const bool one_key = s->seq_k == 1 && (i == DQ || i == DK); /* with one key dq and dk are 0 */

        if (!one_key)
            td_assert_close(names[i - O], s->dtype, data, truths[i - O],
                            i == DK || i == DV ? r->host.keys : r->host.queries,
                            s->dtype == TD_F32 ? 3e-6 : 8e-3);
        free(data);
    }
}

static void agrees_with_float64(const char *name, const td_attention_shape *shape, size_t skip)
{
    run r = open_run(name, shape, skip);
    td_attend_truth truth = td_attend_truth_of(&r.host);

    td_assert_ok(go(&r));
    assert_near(&r, &truth);
    td_attend_truth_free(&truth);
    close_run(&r);
}

/* ---- shapes ---- */

TD_TEST(shapes_agree_with_float64)
{
    /* Tiles of every size, and lengths on both sides of them; every width; numbers of keys other than
     * queries; and shapes whose GEMMs cuBLASLt computes. */
    static const td_attention_shape shapes[] = {
        {.batch = 2, .heads = 3, .seq = 64, .head_dim = 16},
        {.batch = 1, .heads = 2, .seq = 257, .head_dim = 32, .causal = true},
        {.batch = 8, .heads = 1, .seq = 256, .head_dim = 64},
        {.batch = 1, .heads = 1, .seq = 100, .seq_k = 333, .head_dim = 80, .causal = true},
        {.batch = 2, .heads = 1, .seq = 129, .head_dim = 128, .causal = true},
        {.batch = 1, .heads = 2, .seq = 77, .seq_k = 20, .head_dim = 40, .causal = true},
        {.batch = 1, .heads = 1, .seq = 2000, .head_dim = 16, .causal = true},
        {.batch = 1, .heads = 1, .seq = 2048, .head_dim = 32},
        {.batch = 1, .heads = 1, .seq = 1990, .head_dim = 64, .causal = true},
        {.batch = 2, .heads = 1, .seq = 1024, .head_dim = 64},
        {.batch = 1, .heads = 1, .seq = 1100, .seq_k = 1024, .head_dim = 128},
        {.batch = 1, .heads = 1, .seq = 3, .seq_k = 1, .head_dim = 8},
        {.batch = 1,
         .heads = 1,
         .seq = 50,
         .head_dim = 7,
         .scale = 0.3f,
         .causal = true,
         .mask = TD_MASK_ADD_1E6},
    };
    const size_t count = td_gpu_small() ? 6 : sizeof shapes / sizeof *shapes;

    for (size_t i = 0; i < count; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            td_attention_shape shape = shapes[i];

            shape.dtype = bf16 ? TD_BF16 : TD_F32;
            shape.deterministic = i % 2 == 1;
            agrees_with_float64("jit_gpu", &shape, 0);
        }
}

TD_TEST(tensors_may_lie_anywhere)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 70,
                                          .head_dim = 32,
                                          .causal = true,
                                          .dtype = bf16 ? TD_BF16 : TD_F32};
        agrees_with_float64("anywhere", &shape, 1);
    }
}

TD_TEST(o_may_lie_as_the_projection_reads_it)
{
    td_attention_shape shape = {.batch = 2, .heads = 3, .seq = 90, .head_dim = 64, .causal = true};

    for (int bf16 = 0; bf16 < 2; bf16++) {
        shape.dtype = bf16 ? TD_BF16 : TD_F32;
        shape.deterministic = true;
        shape.o_bshd = false;
        run plain = open_run("order", &shape, 0);
        shape.o_bshd = true;
        run moved = open_run("order", &shape, 0);
        void *const dout = malloc(plain.bytes[DOUT]), *const o = malloc(plain.bytes[O]);

        td_attend_exchange(&shape, true, plain.host.dout, dout);
        td_assert_ok(td_device_upload(gpu, moved.blocks[DOUT], dout, plain.bytes[DOUT]));
        td_assert_ok(go(&plain));
        td_assert_ok(go(&moved));
        void *const there = fetch(&moved, O), *const here = fetch(&plain, O);
        td_attend_exchange(&shape, false, there, o);
        td_assert_identical("o", shape.dtype, o, here, plain.host.queries);
        free(there);
        free(here);
        for (int i = DQ; i <= DV; i++) {
            void *const a = fetch(&plain, i), *const b = fetch(&moved, i);
            td_assert_identical("a gradient", shape.dtype, a, b,
                                i == DQ ? plain.host.queries : plain.host.keys);
            free(a);
            free(b);
        }
        free(dout);
        free(o);
        close_run(&plain);
        close_run(&moved);
    }
}

/* With one head, both orders of o are the same. cuBLASLt computes the GEMMs of the first order, and tiles
 * compute the second. The code of one order must not be used for the other. */
TD_TEST(o_may_lie_so_if_a_library_computes_the_gemms)
{
    td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 1024, .head_dim = 64, .dtype = TD_F32};

    for (int turn = 0; turn < 3; turn++) {
        shape.o_bshd = turn % 2 == 1;
        agrees_with_float64("beside products", &shape, 0);
    }
}

TD_TEST(bits_repeat)
{
    td_attention_shape shape = {.batch = 2, .heads = 4, .seq = 300, .head_dim = 64};

    for (int bf16 = 0; bf16 < 2; bf16++) {
        shape.dtype = bf16 ? TD_BF16 : TD_F32;
        shape.deterministic = true;
        run r = open_run("repeats", &shape, 0);
        void *first[BLOCKS];

        td_assert_ok(go(&r));
        for (int i = O; i <= DV; i++)
            first[i] = fetch(&r, i);
        td_assert_ok(go(&r));
        for (int i = O; i <= DV; i++) {
            void *const again = fetch(&r, i);
            assert_memory_equal(first[i], again, r.bytes[i]);
            free(first[i]);
            free(again);
        }
        close_run(&r);
    }
}

/* ---- graphs, the folder, errors ---- */

TD_TEST(a_graph_may_be_captured_without_preparing)
{
    const td_attention_shape shape = {
        .batch = 1, .heads = 2, .seq = 47, .head_dim = 48, .causal = true, .dtype = TD_BF16};
    run r = open_run("graph", &shape, 0);
    td_attend_truth truth = td_attend_truth_of(&r.host);
    td_graph *graph = NULL;

    td_assert_ok(td_graph_begin(gpu));
    const td_status status = go(&r);
    td_assert_ok(td_graph_end(gpu, &graph));
    td_assert_ok(status);
    td_assert_ok(td_graph_launch(graph));
    assert_near(&r, &truth);
    td_graph_destroy(graph);
    td_attend_truth_free(&truth);
    close_run(&r);
}

static td_jit_info info_of(td_device *dev)
{
    td_jit_info info;

    td_assert_ok(td_jit_info_of(dev, &info));
    return info;
}

static td_jit_info prepare_with(const char *compiler, const char *cache, td_status expected,
                                const char *words)
{
    const td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 33, .head_dim = 16, .dtype = TD_F32};
    td_device *dev;

    td_assert_ok(td_device_open("cuda", &dev));
    td_assert_ok(td_jit_configure(dev, &(td_jit_options){.compiler = compiler, .cache = cache}));
    if (expected == TD_OK)
        td_assert_ok(td_jit_prepare(dev, &shape));
    else
        td_assert_refused(td_jit_prepare(dev, &shape), expected, words);
    const td_jit_info info = info_of(dev);
    td_device_close(dev);
    return info;
}

TD_TEST(code_is_kept_checked_and_made_again)
{
    char cache[64], path[512] = "";

    snprintf(cache, sizeof cache, "%s/kept", folder);
    assert_int_equal(prepare_with(NULL, cache, TD_OK, NULL).compiled, 2);
    assert_int_equal(prepare_with(NULL, cache, TD_OK, NULL).loaded, 2);
    DIR *dir = opendir(cache);
    assert_non_null(dir);
    for (struct dirent *each; (each = readdir(dir));)
        if (each->d_name[0] != '.')
            snprintf(path, sizeof path, "%s/%s", cache, each->d_name);
    closedir(dir);
    assert_int_equal(truncate(path, 1000), 0);
    const td_jit_info info = prepare_with(NULL, cache, TD_OK, NULL);
    assert_int_equal(info.compiled + 10 * info.rejected + 100 * info.loaded, 111);
    assert_non_null(strstr(info.note, "is corrupt"));
    prepare_with("/no/such/libnvrtc.so", cache, TD_LIBRARY_ERROR, "no NVRTC");
}

TD_TEST(refuses_what_it_has_no_code_for)
{
    td_attention_shape shape = {.batch = 1, .heads = 1, .seq = 33, .head_dim = 129, .dtype = TD_F32};
    td_attention_sizes sizes;

    td_assert_refused(td_jit_sizes(gpu, &shape, &sizes), TD_UNSUPPORTED, "head_dim is 129");
    shape.head_dim = 16, shape.dtype = TD_F16;
    td_assert_refused(td_jit_sizes(gpu, &shape, &sizes), TD_UNSUPPORTED, "dtype is f16");
    shape.dtype = TD_F32, shape.tf32 = true;
    td_assert_refused(td_jit_sizes(gpu, &shape, &sizes), TD_UNSUPPORTED, "tf32 is set");
    shape.tf32 = false, shape.seq = (int64_t)1 << 31;
    td_assert_refused(td_jit_sizes(gpu, &shape, &sizes), TD_UNSUPPORTED, "goes up to 2^30");
    shape.seq = (int64_t)1 << 30, shape.batch = 1 << 10;
    td_assert_refused(td_jit_sizes(gpu, &shape, &sizes), TD_UNSUPPORTED, "more rows than a grid has blocks");
}

static int remove_folder(void **state)
{
    char command[96];

    (void)state;
    td_device_close(gpu);
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

int main(void)
{
    gpu = td_gpu_open();
    if (!mkdtemp(folder))
        return 1;
    return td_run_tests("jit, GPU", NULL, remove_folder);
}
