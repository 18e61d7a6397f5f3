/* The functions of attention.h and flash.h. */
#include "support/fuzz_api_kit.h"

#include "flash/flash.h"

typedef struct attention_case {
    td_attention_shape s;
    int64_t keys;
    size_t queries_bytes, keys_bytes;
} attention_case;

static attention_case draw_attention(bool flash)
{
    attention_case c = {.s = {.batch = extent("batch|q|k|scores"),
                              .heads = extent("heads|q|k|scores"),
                              .seq = extent("seq|q|scores"),
                              .seq_k = index_in("seq_k", 4),
                              .head_dim = extent("head_dim|q|k"),
                              .dtype = dtype("dtype"),
                              .causal = td_fuzz_chance(50),
                              .mask = (td_mask)choice("mask", 2),
                              .deterministic = td_fuzz_chance(50),
                              .o_bshd = td_fuzz_chance(50)}};

    if (wrong()) {
        static const float bad[] = {NAN, INFINITY, -INFINITY, -1, -1e-45f};

        c.s.scale = BAD_NUMBER(bad);
        impossible(TD_BAD_ARGUMENT, "scale");
    } else {
        static const float good[] = {0, 1, 0.125f, 1e-45f, 100};

        c.s.scale = TD_FUZZ_PICK(good);
    }
    SPOIL(c.s.seq_k, "seq_k|k|scores", INT64_MAX, INT64_MAX / 8);
    if (wrong()) {
        c.s.tf32 = true;
        impossible_if(c.s.dtype != TD_F32, "tf32");
        impossible(TD_UNSUPPORTED, "tf32");
    }
    if (flash && wrong()) {
        c.s.head_dim = 257;
        impossible(TD_UNSUPPORTED, "head_dim");
    }
    c.keys = c.s.seq_k ? c.s.seq_k : c.s.seq;
    c.queries_bytes = BYTES(c.s.dtype, c.s.batch, c.s.heads, c.s.seq, c.s.head_dim);
    c.keys_bytes = BYTES(c.s.dtype, c.s.batch, c.s.heads, c.keys, c.s.head_dim);
    return c;
}

static td_status call_sizes(bool flash,
                            td_status (*sizes)(td_device *, const td_attention_shape *, td_attention_sizes *))
{
    const attention_case c = draw_attention(flash);
    void *result = out("out", sizeof(td_attention_sizes));

    return sizes(dev(), pointer("shape", &c.s), result);
}

static td_status call_forward(const td_attention_impl *impl, bool flash)
{
    const attention_case c = draw_attention(flash);
    td_attention_sizes sizes = {0};
    const td_status status = impl->sizes(api_dev, &c.s, &sizes);
    const void *q = in("q", c.queries_bytes), *k = in("k", c.keys_bytes), *v = in("v", c.keys_bytes);
    void *o = out("o", c.queries_bytes);
    void *saved = out(flash ? "lse" : "saved", status == TD_OK ? sizes.saved : 4096);
    void *scratch = work(status, &sizes.forward_work);

    return impl->forward(dev(), pointer("shape", &c.s), q, k, v, o, saved, scratch);
}

static td_status call_backward(const td_attention_impl *impl, bool flash)
{
    const attention_case c = draw_attention(flash);
    td_attention_sizes sizes = {0};
    const td_status status = impl->sizes(api_dev, &c.s, &sizes);
    const void *q = in("q", c.queries_bytes), *k = in("k", c.keys_bytes), *v = in("v", c.keys_bytes);
    const void *o = in("o", c.queries_bytes), *dout = in("dout", c.queries_bytes);
    const void *saved = in(flash ? "lse" : "saved", status == TD_OK ? sizes.saved : 4096);
    void *dq = out("dq", c.queries_bytes), *dk = out("dk", c.keys_bytes), *dv = out("dv", c.keys_bytes);
    void *scratch = work(status, &sizes.backward_work);

    return impl->backward(dev(), pointer("shape", &c.s), q, k, v, o, dout, saved, dq, dk, dv, scratch);
}

static td_status call_describe(td_status (*describe)(td_device_kind, td_attention_traits *))
{
    const td_device_kind kind = (td_device_kind)choice("kind", 2);

    return describe(kind, out("out", sizeof(td_attention_traits)));
}

API_IS(td_attention_naive_describe, call_describe(td_attention_naive_describe))
API_IS(td_flash_describe, call_describe(td_flash_describe))
API_IS(td_attention_naive_sizes, call_sizes(false, td_attention_naive_sizes))
API_IS(td_attention_naive_forward, call_forward(&td_attention_naive, false))
API_IS(td_attention_naive_backward, call_backward(&td_attention_naive, false))
API_IS(td_flash_sizes, call_sizes(true, td_flash_sizes))
API_IS(td_flash_forward, call_forward(&td_attention_flash, true))
API_IS(td_flash_backward, call_backward(&td_attention_flash, true))

API(td_attention_naive)
{
    assert_string_equal(td_attention_naive.name, "naive");
    assert_true(td_attention_naive.sizes == td_attention_naive_sizes);
    assert_true(td_attention_naive.forward == td_attention_naive_forward);
    assert_true(td_attention_naive.backward == td_attention_naive_backward);
    return TD_OK;
}

API(td_attention_flash)
{
    assert_string_equal(td_attention_flash.name, "flash");
    assert_true(td_attention_flash.sizes == td_flash_sizes);
    return td_fuzz_chance(50) ? call_forward(&td_attention_flash, true)
                              : call_backward(&td_attention_flash, true);
}
