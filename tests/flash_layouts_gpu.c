/* Tensors at any address, o in the order of the projection, and gradients that are slices of rows. */
#include "flash/flash.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/flash_gpu_kit.h"
#include "support/gpu.h"
#include "support/test.h"

#include <math.h>

/* Rows that do not start at 16 bytes are read element by element. In f32 the order of sums is the same.
 * With 16 bits the portable kernels run instead of Hopper's. */
TD_TEST(takes_tensors_at_any_address)
{
    for (int kind = 0; kind < KINDS; kind++) {
        const td_attention_shape shape = {.batch = 1,
                                          .heads = 2,
                                          .seq = 150,
                                          .seq_k = 90,
                                          .head_dim = 64,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = true,
                                          .deterministic = true};
        td_attend_run run = inputs_of("addresses", &shape);
        results aligned = compute(&run, 0), shifted = compute(&run, 1);

        const struct {
            const char *name;
            const void *aligned, *shifted;
            int64_t count;
        } outputs[] = {{"o", aligned.o, shifted.o, run.queries},
                       {"dv", aligned.dv, shifted.dv, run.keys},
                       {"dq", aligned.dq, shifted.dq, run.queries},
                       {"dk", aligned.dk, shifted.dk, run.keys}};
        for (int i = 0; i < 4; i++) {
            /* rowsum(dO * O) is summed by other lanes, so the last bits of dq and dk may differ. */
            if (shape.dtype == TD_F32 && i < 2) {
                td_assert_identical(outputs[i].name, shape.dtype, outputs[i].aligned, outputs[i].shifted,
                                    outputs[i].count);
                continue;
            }
            double *values = td_as_f64(shape.dtype, outputs[i].aligned, outputs[i].count);
            td_assert_close(outputs[i].name, shape.dtype, outputs[i].shifted, values, outputs[i].count,
                            tolerance_of(&shape));
            free(values);
        }
        free_results(&aligned);
        free_results(&shifted);
        free_inputs(&run);
    }
}

/* o_bshd changes only the order of o and dout in memory. Our kernels give the same bits. cuBLASLt is called
 * once for each batch element, so its values differ by rounding. 1100 queries of few heads are cut into
 * parts. Rows of 33 elements are read one by one. In f16 dq is summed by atomics. */
TD_TEST(o_may_lie_as_the_projection_reads_it)
{
    const struct {
        int64_t batch, heads, seq, seq_k, head_dim;
    } shapes[] = {{2, 3, 129, 129, 64},   {3, 2, 70, 150, 80}, {2, 5, 90, 65, 33},
                  {1, 2, 1100, 1100, 64}, {4, 1, 40, 40, 128}, {2, 3, 1, 40, 16}};
    const td_attention_impl *const impls[] = {&td_attention_flash, &td_attention_naive};

    for (size_t i = 0; i < 2 * KINDS * sizeof shapes / sizeof *shapes; i++) {
        const int kind = (int)(i / 2 % KINDS);
        const td_attention_shape shape = {.batch = shapes[i / 2 / KINDS].batch,
                                          .heads = shapes[i / 2 / KINDS].heads,
                                          .seq = shapes[i / 2 / KINDS].seq,
                                          .seq_k = shapes[i / 2 / KINDS].seq_k,
                                          .head_dim = shapes[i / 2 / KINDS].head_dim,
                                          .dtype = kinds[kind].dtype,
                                          .tf32 = kinds[kind].tf32,
                                          .causal = shapes[i / 2 / KINDS].seq > 1,
                                          .deterministic = kinds[kind].dtype != TD_F16};
        td_attend_run run = inputs_of("layout", &shape);
        void *dout = td_fence_alloc((size_t)run.queries * td_dtype_size(shape.dtype)), *const first =
                                                                                           run.dout;

        run.impl = impls[i % 2];
        results plain = compute(&run, 0);
        td_attend_exchange(&shape, true, first, dout);
        run.dout = dout;
        run.shape.o_bshd = true;
        results other = compute(&run, 0);
        td_attend_exchange(&shape, false, other.o, dout);
        memcpy(other.o, dout, (size_t)run.queries * td_dtype_size(shape.dtype));
        if (i % 2 == 0) {
            assert_identical_results(&run, &plain, &other, shape.deterministic);
        } else {
            void *const got[] = {other.o, other.dq, other.dk, other.dv};
            void *const expected[] = {plain.o, plain.dq, plain.dk, plain.dv};

            for (int which = 0; which < 4; which++) {
                const int64_t count = which < 2 ? run.queries : run.keys;
                double *values = td_as_f64(shape.dtype, expected[which], count);
                td_assert_close("o or a gradient", shape.dtype, got[which], values, count,
                                4 * tolerance_of(&shape)); /* S and P are rounded too */
                free(values);
            }
        }
        td_fence_free(dout);
        run.dout = first;
        free_results(&plain);
        free_results(&other);
        free_inputs(&run);
    }
}

/* Puts the heads of rows one after the other, and checks that nothing was written between rows. */
static void *heads_of(const td_attention_shape *s, int64_t seq, int64_t first, int64_t end, void *block)
{
    const size_t element = td_dtype_size(s->dtype), head = (size_t)s->head_dim * element;
    unsigned char *const rows = td_gpu_read(gpu, block, (size_t)(s->batch * seq * s->grad_pitch) * element),
                         *const heads = malloc((size_t)(s->batch * seq * s->heads) * head);

    assert_non_null(heads);
    for (int64_t row = 0; row < s->batch * seq; row++) {
        unsigned char *const from = rows + (size_t)(row * s->grad_pitch) * element;

        for (int64_t h = 0; h < s->heads; h++)
            memcpy(heads + (size_t)((row / seq * s->heads + h) * seq + row % seq) * head,
                   from + (size_t)first * element + (size_t)h * head, head);
        for (size_t i = (size_t)end * element; i < (size_t)s->grad_pitch * element; i++)
            assert_int_equal(from[i], 0xFF);
    }
    free(rows);
    return heads;
}

/* Rotates the rows of heads back, as the gradient of rotary position embedding does. */
static void turn_back(double *x, int64_t heads, int64_t seq, int64_t head_dim, const float *cosine,
                      const float *sine)
{
    for (int64_t pair = 0; pair < heads * seq * head_dim / 2; pair++) {
        const int64_t angle = pair % (seq * head_dim / 2);
        const double even = x[2 * pair], odd = x[2 * pair + 1];

        x[2 * pair] = even * (double)cosine[angle] + odd * (double)sine[angle];
        x[2 * pair + 1] = odd * (double)cosine[angle] - even * (double)sine[angle];
    }
}

/* Lengths on both sides of a tile; sequences whose keys are cut into parts; heads filled up with zeros. */
TD_TEST(gradients_may_be_slices_of_rows_before_the_rotation)
{
    const struct {
        int64_t batch, heads, seq, seq_k, head_dim;
    } shapes[] = {{2, 3, 129, 129, 64},   {3, 2, 70, 150, 80},   {2, 5, 90, 65, 24}, {1, 3, 300, 300, 128},
                  {1, 2, 1100, 1100, 64}, {40, 4, 128, 128, 96}, {1, 1, 40, 1, 16}};

    for (size_t i = 0; i < 4 * (sizeof shapes / sizeof *shapes); i++) {
        const int64_t heads = shapes[i / 4].heads, head_dim = shapes[i / 4].head_dim,
                      most =
                          shapes[i / 4].seq > shapes[i / 4].seq_k ? shapes[i / 4].seq : shapes[i / 4].seq_k;
        const td_attention_shape plain = {.batch = shapes[i / 4].batch,
                                          .heads = heads,
                                          .seq = shapes[i / 4].seq,
                                          .seq_k = shapes[i / 4].seq_k,
                                          .head_dim = head_dim,
                                          .dtype = i % 2 ? TD_F16 : TD_BF16,
                                          .causal = true,
                                          .deterministic = i / 4 == 5};
        td_attend_run run = inputs_of("rows", &plain);
        td_attend_truth truth = td_attend_truth_of(&run);
        const blocks b = open_blocks(&run, 0);
        const size_t angles = (size_t)(most * head_dim / 2) * sizeof(float);
        float *const cosine = malloc(angles), *const sine = malloc(angles);

        assert_true(cosine && sine);
        for (int64_t at = 0; at < most * head_dim / 2; at++) {
            cosine[at] = cosf((float)at);
            sine[at] = sinf((float)at);
        }
        void *const c = td_gpu_block(gpu, cosine, angles), *const s = td_gpu_block(gpu, sine, angles);
        td_attention_shape *const shape = &run.shape;
        shape->grad_pitch = 2 * heads * head_dim + 8;
        if (i / 2 % 2) {
            shape->cos = c;
            shape->sin = s;
            turn_back(truth.dq, plain.batch * heads, plain.seq, head_dim, cosine, sine);
            turn_back(truth.dk, plain.batch * heads, plain.seq_k, head_dim, cosine, sine);
        }
        const size_t row = (size_t)shape->grad_pitch * 2;
        char *const dq = td_gpu_block(gpu, NULL, (size_t)(plain.batch * plain.seq) * row),
                    *const dk = td_gpu_block(gpu, NULL, (size_t)(plain.batch * plain.seq_k) * row),
                    *const dv = dk + heads * head_dim * 2;

        td_assert_ok(td_flash_forward(gpu, shape, b.q, b.k, b.v, b.o, b.lse, b.forward_work));
        if (b.sizes.packs) {
            td_assert_ok(td_flash_backward(gpu, shape, b.q, b.k, b.v, b.o, b.dout, b.lse, dq, dk, dv,
                                           b.backward_work));
            void *const got[] = {heads_of(shape, plain.seq, 0, heads * head_dim, dq),
                                 heads_of(shape, plain.seq_k, 0, 2 * heads * head_dim, dk),
                                 heads_of(shape, plain.seq_k, heads * head_dim, 2 * heads * head_dim, dk)};
            if (plain.seq_k > 1) {
                td_assert_close("dq", plain.dtype, got[0], truth.dq, run.queries, tolerance_of(&plain));
                td_assert_close("dk", plain.dtype, got[1], truth.dk, run.keys, tolerance_of(&plain));
            }
            td_assert_close("dv", plain.dtype, got[2], truth.dv, run.keys, tolerance_of(&plain));
            for (int which = 0; which < 3; which++)
                free(got[which]);
        }
        td_assert_refused(
            td_flash_backward(gpu, shape, b.q, b.k, b.v, b.o, b.dout, b.lse, dq + 2, dk, dv, b.backward_work),
            TD_UNSUPPORTED, "grad_pitch is");
        td_gpu_free(gpu, dq);
        td_gpu_free(gpu, dk);
        td_gpu_free(gpu, c);
        td_gpu_free(gpu, s);
        free(cosine);
        free(sine);
        close_blocks(&b);
        td_attend_truth_free(&truth);
        free_inputs(&run);
    }
}

int main(void)
{
    gpu = td_gpu_open();
    if (td_gpu_small())
        td_test_count = 1; /* takes_tensors_at_any_address */
    const int failed = td_run_tests("layouts of flash attention on a GPU", NULL, NULL);
    td_device_close(gpu);
    return failed;
}
