/* The functions of jit.h. A call that is not refused compiles, which takes longer than all other calls here.
 * So few such calls are made, with one shape. */
#include "support/fuzz_api_kit.h"

#include "jit/jit.h"

static bool spares_a_compiler(void)
{
    return !api_spoilt() && td_fuzz_below(200) > 0;
}

typedef struct jit_case {
    td_attention_shape s;
    size_t bytes;
    td_attention_sizes sizes;
    td_status status;
} jit_case;

static jit_case draw_jit(void)
{
    jit_case c = {.s = {.batch = extent("batch|q|k|scores|saved|work"), .heads = 2, .seq = 3, .head_dim = 4}};

    c.s.dtype = dtype("dtype");
    if (!api_spoilt())
        c.s.dtype = TD_F32;
    SPOIL(c.s.scale, "scale", NAN);
    if (wrong()) {
        c.s.tf32 = true;
        impossible_if(c.s.dtype != TD_F32, "tf32");
        impossible(TD_UNSUPPORTED, "tf32");
    }
    if (wrong()) {
        c.s.head_dim = 257;
        impossible(TD_UNSUPPORTED, "head_dim");
    }
    c.bytes = BYTES(c.s.dtype, c.s.batch, c.s.heads, c.s.seq, c.s.head_dim);
    c.status = td_jit_sizes(api_dev, &c.s, &c.sizes);
    if (c.status != TD_OK)
        c.sizes.saved = 4096;
    return c;
}

API(td_jit_configure)
{
    static const char *const names[] = {"cc", "/no/such/compiler"};
    td_jit_options options = {.compiler = NULL};

    if (td_fuzz_chance(50))
        options.compiler = names[td_fuzz_below(2)];
    SPOIL(options.compiler, "compiler", "");
    SPOIL(options.cache, "cache", "");
    SPOIL(options.scratch, "scratch", "");
    return td_jit_configure(dev(), pointer("options", &options));
}

API(td_jit_info_of)
{
    return td_jit_info_of(dev(), out("out", sizeof(td_jit_info)));
}

API(td_jit_describe)
{
    const td_device_kind kind = (td_device_kind)choice("kind", 2);

    return td_jit_describe(kind, out("out", sizeof(td_attention_traits)));
}

API(td_jit_sizes)
{
    const jit_case c = draw_jit();
    void *result = out("out", sizeof(td_attention_sizes));

    return td_jit_sizes(dev(), pointer("shape", &c.s), result);
}

API(td_jit_prepare)
{
    const jit_case c = draw_jit();
    const td_attention_shape *const shape = pointer("shape", &c.s);
    td_device *const on = dev();

    return spares_a_compiler() ? TD_OK : td_jit_prepare(on, shape);
}

static td_status call_forward(const td_attention_impl *impl)
{
    const jit_case c = draw_jit();
    const void *q = in("q", c.bytes), *k = in("k", c.bytes), *v = in("v", c.bytes);
    void *o = out("o", c.bytes), *saved = out("saved", c.sizes.saved);
    void *scratch = work(c.status, &c.sizes.forward_work);
    td_device *const on = dev();
    const td_attention_shape *const shape = pointer("shape", &c.s);

    return spares_a_compiler() ? TD_OK : impl->forward(on, shape, q, k, v, o, saved, scratch);
}

API(td_jit_forward)
{
    return call_forward(&td_attention_jit);
}

API(td_jit_backward)
{
    const jit_case c = draw_jit();
    const void *q = in("q", c.bytes), *k = in("k", c.bytes), *v = in("v", c.bytes);
    const void *o = in("o", c.bytes), *dout = in("dout", c.bytes), *saved = in("saved", c.sizes.saved);
    void *dq = out("dq", c.bytes), *dk = out("dk", c.bytes), *dv = out("dv", c.bytes);
    void *scratch = work(c.status, &c.sizes.backward_work);
    td_device *const on = dev();
    const td_attention_shape *const shape = pointer("shape", &c.s);

    return spares_a_compiler() ? TD_OK
                               : td_jit_backward(on, shape, q, k, v, o, dout, saved, dq, dk, dv, scratch);
}

API(td_attention_jit)
{
    assert_string_equal(td_attention_jit.name, "jit");
    assert_true(td_attention_jit.describe == td_jit_describe && td_attention_jit.sizes == td_jit_sizes);
    return call_forward(&td_attention_jit);
}
