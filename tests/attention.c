#include "support/attention_kit.h"

#include "accounting/accounting.h"
#include "attention/shape.h"
#include "support/compare.h"
#include "support/test.h"

/* The memory for backward is q, k, v, o and P, byte for byte as the accounting states. Backward adds dP. */
TD_TEST(memory_is_what_the_accounting_says)
{
    td_device *dev = *state;
    const td_attention_shape shapes[] = {
        {.batch = 2, .heads = 3, .seq = 64, .head_dim = 16, .dtype = TD_F32},
        {.batch = 2, .heads = 1, .seq = 33, .seq_k = 57, .head_dim = 5, .dtype = TD_F32, .causal = true},
        {.batch = 1, .heads = 2, .seq = 128, .head_dim = 80, .dtype = TD_BF16},
    };

    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const td_attention_shape *s = &shapes[i];
        const int64_t seq_k = s->seq_k ? s->seq_k : s->seq, heads = s->batch * s->heads;
        const size_t element = td_dtype_size(s->dtype);
        const size_t query = (size_t)(heads * s->seq * s->head_dim) * element;
        const size_t key = (size_t)(heads * seq_k * s->head_dim) * element;
        td_attention_sizes sizes;
        td_account_attention account;
        td_memory_stats memory;
        void *q, *k, *v, *o, *saved, *work = NULL;

        td_assert_ok(td_attention_naive_sizes(dev, s, &sizes));
        td_assert_ok(td_account_attention_memory(heads, s->seq, seq_k, s->head_dim, (int64_t)element, 1,
                                                 s->causal, &account));
        td_assert_ok(td_device_alloc(dev, query, &q));
        td_assert_ok(td_device_alloc(dev, key, &k));
        td_assert_ok(td_device_alloc(dev, key, &v));
        td_assert_ok(td_device_alloc(dev, query, &o));
        td_assert_ok(td_device_alloc(dev, sizes.saved, &saved));
        td_assert_ok(td_device_fill(dev, q, 0, query));
        td_assert_ok(td_device_fill(dev, k, 0, key));
        td_assert_ok(td_device_fill(dev, v, 0, key));
        if (sizes.forward_work > 0)
            td_assert_ok(td_device_alloc(dev, sizes.forward_work, &work));
        td_assert_ok(td_attention_naive_forward(dev, s, q, k, v, o, saved, work));
        td_assert_ok(td_device_free(dev, work));
        td_assert_ok(td_device_memory(dev, &memory));
        assert_int_equal(memory.current_bytes, account.saved_naive);
        assert_int_equal(sizes.saved, account.matrix);
        assert_true(sizes.backward_work >= (size_t)account.matrix);
        if (s->dtype == TD_F32) /* f32 GEMMs need no scratch */
            assert_int_equal(sizes.backward_work, account.matrix);

        void *const blocks[] = {q, k, v, o, saved};
        for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++)
            td_assert_ok(td_device_free(dev, blocks[b]));
    }
}

TD_TEST(refuses_a_score_matrix_that_no_machine_could_hold)
{
    td_attention_sizes sizes;
    /* 2^60 scores, 2^62 bytes: two such tensors are above 2^63 - 1 */
    const td_attention_shape shape = {
        .batch = (int64_t)1 << 20, .heads = 1, .seq = (int64_t)1 << 20, .head_dim = 1, .dtype = TD_F32};

    td_assert_refused(td_attention_naive_sizes(*state, &shape, &sizes), TD_BAD_ARGUMENT,
                      "bytes of the scores");
}

#define SHAPE(d, ...)                                                                                        \
    {                                                                                                        \
        .batch = 1, .heads = 3, .seq = 4, .head_dim = d, __VA_ARGS__                                         \
    }

TD_TEST(refuses_shapes_that_contradict_themselves)
{
    static const float t[8];
    const struct {
        td_attention_shape shape;
        const char *words;
    } cases[] = {
        {SHAPE(8, .dtype = TD_BF16, .tf32 = true), "tf32 is set, but dtype is bf16"},
        {SHAPE(8, .dtype = TD_F32, .grad_pitch = 23),
         "grad_pitch is 23, needs 0 or at least heads * head_dim, 24"},
        {SHAPE(8, .dtype = TD_F32, .grad_pitch = 24, .cos = t), "sin is NULL, needs cos and sin or neither"},
        {SHAPE(8, .dtype = TD_F32, .grad_pitch = 24, .sin = t), "cos is NULL, needs cos and sin or neither"},
        {SHAPE(8, .dtype = TD_F32, .cos = t, .sin = t), "an even head_dim, not 0 and 8"},
        {SHAPE(7, .dtype = TD_F32, .grad_pitch = 24, .cos = t, .sin = t), "an even head_dim, not 24 and 7"},
    };
    td_attention_shape s = SHAPE(8, .dtype = TD_F32, .grad_pitch = 24);
    td_attention_sizes sizes;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        td_assert_refused(td_attention_naive_sizes(*state, &cases[i].shape, &sizes), TD_BAD_ARGUMENT,
                          cases[i].words);
    td_assert_ok(td_attention_naive_sizes(*state, &s, &sizes));
    td_assert_refused(td_attention_naive_backward(*state, &s, &s, &s, &s, &s, &s, &s, &s, &s, &s, NULL),
                      TD_UNSUPPORTED, "gradients of this shape cannot be slices of rows");
}

TD_TEST(says_what_it_is)
{
    td_attention_traits traits;

    td_assert_ok(td_attention_naive_describe(TD_DEVICE_CPU, &traits));
    assert_string_equal(traits.saved, "scores");
    assert_int_equal(traits.saved_floats, 0);
    assert_false(traits.skips_masked || traits.rebuilds_scores || traits.tf32);
    assert_int_equal(traits.dtypes, 1 << TD_F32 | 1 << TD_BF16);
    td_assert_ok(td_attention_naive_describe(TD_DEVICE_CUDA, &traits));
    assert_int_equal(traits.dtypes, 1 << TD_F32 | 1 << TD_BF16 | 1 << TD_F16);
    assert_true(traits.tf32);
}

int main(void)
{
    const td_attend_subject naive = {&td_attention_naive, 0};

    return td_attend_common_tests(&naive) +
           td_run_tests("attention, naive", td_attend_open_cpu, td_attend_close_cpu);
}
