#include "support/flash_gpu_kit.h"

#include "flash/flash.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/gpu.h"
#include "support/test.h"

td_device *gpu;

const struct kind kinds[KINDS] = {{TD_F32, false}, {TD_F32, true}, {TD_BF16, false}, {TD_F16, false}};

void free_results(results *r)
{
    free(r->o);
    free(r->dq);
    free(r->dk);
    free(r->dv);
    free(r->lse);
}

td_attend_run inputs_of(const char *name, const td_attention_shape *shape)
{
    td_attend_run run = {.impl = &td_attention_flash, .shape = *shape};

    if (run.shape.seq_k == 0)
        run.shape.seq_k = shape->seq;
    run.rows = shape->batch * shape->heads * shape->seq;
    run.queries = run.rows * shape->head_dim;
    run.keys = shape->batch * shape->heads * run.shape.seq_k * shape->head_dim;
    run.q = td_draw_normal(name, 1, shape->dtype, run.queries);
    run.k = td_draw_normal(name, 2, shape->dtype, run.keys);
    run.v = td_draw_normal(name, 3, shape->dtype, run.keys);
    run.dout = td_draw_normal(name, 4, shape->dtype, run.queries);
    return run;
}

void free_inputs(td_attend_run *run)
{
    td_fence_free(run->q);
    td_fence_free(run->k);
    td_fence_free(run->v);
    td_fence_free(run->dout);
}

blocks open_blocks(const td_attend_run *run, size_t skip)
{
    const size_t element = td_dtype_size(run->shape.dtype), shift = skip * element;
    const size_t queries = (size_t)run->queries * element, keys = (size_t)run->keys * element;
    td_attention_sizes sizes;

    td_assert_ok(run->impl->sizes(gpu, &run->shape, &sizes));
    const blocks b = {.q = td_gpu_block(gpu, NULL, queries + shift),
                      .k = td_gpu_block(gpu, NULL, keys + shift),
                      .v = td_gpu_block(gpu, NULL, keys + shift),
                      .dout = td_gpu_block(gpu, NULL, queries + shift),
                      .o = td_gpu_block(gpu, NULL, queries + shift),
                      .dq = td_gpu_block(gpu, NULL, queries + shift),
                      .dk = td_gpu_block(gpu, NULL, keys + shift),
                      .dv = td_gpu_block(gpu, NULL, keys + shift),
                      .lse = td_gpu_block(gpu, NULL, sizes.saved),
                      .forward_work = td_gpu_block(gpu, NULL, sizes.forward_work),
                      .backward_work = td_gpu_block(gpu, NULL, sizes.backward_work),
                      .sizes = sizes};

    td_assert_ok(td_device_upload(gpu, (char *)b.q + shift, run->q, queries));
    td_assert_ok(td_device_upload(gpu, (char *)b.k + shift, run->k, keys));
    td_assert_ok(td_device_upload(gpu, (char *)b.v + shift, run->v, keys));
    td_assert_ok(td_device_upload(gpu, (char *)b.dout + shift, run->dout, queries));
    return b;
}

void close_blocks(const blocks *b)
{
    void *const all[] = {
        b->q, b->k, b->v, b->dout, b->o, b->dq, b->dk, b->dv, b->lse, b->forward_work, b->backward_work};

    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        td_gpu_free(gpu, all[i]);
}

void run_passes(const td_attend_run *run, const blocks *b, size_t shift)
{
    td_assert_ok(run->impl->forward(gpu, &run->shape, (char *)b->q + shift, (char *)b->k + shift,
                                    (char *)b->v + shift, (char *)b->o + shift, b->lse, b->forward_work));
    td_assert_ok(run->impl->backward(gpu, &run->shape, (char *)b->q + shift, (char *)b->k + shift,
                                     (char *)b->v + shift, (char *)b->o + shift, (char *)b->dout + shift,
                                     b->lse, (char *)b->dq + shift, (char *)b->dk + shift,
                                     (char *)b->dv + shift, b->backward_work));
}

void *read_behind(const td_attend_run *run, void *block, int64_t count, size_t skip)
{
    const size_t element = td_dtype_size(run->shape.dtype), bytes = (size_t)count * element;
    unsigned char *data = td_gpu_read(gpu, block, bytes + skip * element);

    for (size_t i = 0; i < skip * element; i++)
        assert_int_equal(data[i], 0xFF);
    memmove(data, data + skip * element, bytes);
    return data;
}

results compute(const td_attend_run *run, size_t skip)
{
    const blocks b = open_blocks(run, skip);
    results r;

    run_passes(run, &b, skip * td_dtype_size(run->shape.dtype));
    td_assert_ok(td_device_synchronize(gpu));
    r = (results){.o = read_behind(run, b.o, run->queries, skip),
                  .dq = read_behind(run, b.dq, run->queries, skip),
                  .dk = read_behind(run, b.dk, run->keys, skip),
                  .dv = read_behind(run, b.dv, run->keys, skip),
                  .lse = td_gpu_read(gpu, b.lse, b.sizes.saved)};
    free(td_gpu_read(gpu, b.forward_work, b.sizes.forward_work)); /* reading the block checks its fences */
    free(td_gpu_read(gpu, b.backward_work, b.sizes.backward_work));
    close_blocks(&b);
    return r;
}

/* f32: P is computed from an L of f32. tf32 and the 16-bit types: operands, P and dS are rounded, then the
 * outputs. Errors of single terms average out, so tolerances are a few units of the type's rounding. */
double tolerance_of(const td_attention_shape *shape)
{
    if (shape->dtype == TD_F32)
        return shape->tf32 ? 3e-3 : 3e-6;
    return shape->dtype == TD_BF16 ? 8e-3 : 1.5e-3;
}

void assert_identical_results(const td_attend_run *run, const results *a, const results *b, bool with_dq)
{
    const td_dtype dtype = run->shape.dtype;

    td_assert_identical("lse", TD_F32, a->lse, b->lse, run->rows);
    td_assert_identical("o", dtype, a->o, b->o, run->queries);
    td_assert_identical("dk", dtype, a->dk, b->dk, run->keys);
    td_assert_identical("dv", dtype, a->dv, b->dv, run->keys);
    if (with_dq)
        td_assert_identical("dq", dtype, a->dq, b->dq, run->queries);
}
