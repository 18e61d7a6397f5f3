/* The functions of precision.h. */
#include "support/fuzz_api_kit.h"

#include "precision/precision.h"

API(td_precision_sum)
{
    static const double values[] = {0.01, 0, -1, 1e308, NAN, INFINITY, 5e-324};
    const td_sum_case c = {.count = index_in("count", 300),
                           .value = TD_FUZZ_PICK(values),
                           .addend = dtype_any("addend"),
                           .accumulator = dtype_any("accumulator"),
                           .cast_first = td_fuzz_chance(50),
                           .method = (td_sum_method)choice("method", 3)};

    const size_t narrow = td_dtype_size(c.addend), wide = td_dtype_size(c.accumulator);
    impossible_if(narrow >= wide && wide > 0 && c.addend != c.accumulator, "addend|accumulator");
    double *sum = out("sum", sizeof(double));
    return td_precision_sum(pointer("sum_case", &c), sum, out_or_null(sizeof(int64_t)));
}

API(td_precision_handout_case)
{
    int64_t index = td_fuzz_below(4);

    SPOIL_NUMBER(index, "index", -1, 4, INT64_MAX, INT64_MIN);
    return td_precision_handout_case(index, out("out", sizeof(td_sum_case)));
}

/* Every text is allowed as the name of an operation; only NULL is refused. */
static const char *draw_op(void)
{
    static const char *const ops[] = {"linear", "matmul", "layer_norm", "cross_entropy_loss",
                                      "",       "\xff",   "%n"};

    return pointer("op", TD_FUZZ_PICK(ops));
}

API_IS(td_autocast_rule_find, td_autocast_rule_find((td_autocast_device)choice("device", 2), draw_op(),
                                                    out("out", sizeof(td_autocast_rule))))

API_NAMES(td_autocast_rule, td_autocast_rule_name, "lower", "f32", "widest", "type promotion", "banned")

API(td_autocast_list_size)
{
    const int value = any_enum(2);

    assert_int_equal(td_autocast_list_size((td_autocast_device)value) > 0, value == 0 || value == 1);
    return TD_OK;
}

API(td_autocast_list_entry)
{
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    int64_t index = td_fuzz_below(20);
    const char *op = NULL;

    SPOIL_NUMBER(index, "index", -1, INT64_MIN, INT64_MAX, 1000000);
    const char **to = td_fuzz_chance(95) ? &op : pointer("op", &op);
    return td_autocast_list_entry(device, index, to, out("rule", sizeof(td_autocast_rule)));
}

static td_dtype draw_low(void)
{
    const bool bad = wrong();

    if (bad)
        impossible(TD_BAD_ARGUMENT, "low");
    return bad ? (td_fuzz_chance(50) ? TD_F32 : (td_dtype)17) : td_fuzz_chance(50) ? TD_F16 : TD_BF16;
}

API(td_autocast_result)
{
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    const td_dtype low = draw_low();
    const char *op = draw_op();
    const int64_t count = draw_count();
    td_dtype types[20];

    for (int i = 0; i < 20; i++)
        types[i] = i < count ? dtype_any("input") : TD_F32;
    possible(TD_UNSUPPORTED, "op");
    const td_dtype *inputs = in_copy("inputs", types, (size_t)(count >= 1 ? count : 1) * sizeof *types);
    return td_autocast_result(device, low, op, count, inputs, out("out", sizeof(td_dtype)));
}

API(td_autocast_toy_model)
{
    static const char *const losses[] = {"cross_entropy_loss", "mse_loss", "mean"};
    const td_autocast_device device = (td_autocast_device)choice("device", 2);
    const td_dtype low = draw_low();
    const char *loss = text("loss", 3, losses);
    td_toy_component *components = out("components", 8 * sizeof(td_toy_component));

    possible(TD_UNSUPPORTED, "op");
    return td_autocast_toy_model(device, low, loss, components, out("count", sizeof(int64_t)));
}
