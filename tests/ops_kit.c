#include "ops_kit.h"

td_device *ops_cpu;

ops_case ops_begin(td_dtype dtype, const char *format, ...)
{
    ops_case c = {.dtype = dtype};
    va_list args;

    va_start(args, format);
    vsnprintf(c.name, sizeof c.name, format, args);
    va_end(args);
    return c;
}

void ops_finish(ops_case *c)
{
    for (int i = 0; i < c->fenced_count; i++)
        td_fence_free(c->fenced[i]);
    for (int i = 0; i < c->plain_count; i++)
        free(c->plain[i]);
}

static void *keep(ops_case *c, void *block)
{
    assert_in_range(c->fenced_count, 0, sizeof c->fenced / sizeof *c->fenced - 1);
    c->fenced[c->fenced_count++] = block;
    return block;
}

static double *keep_plain(ops_case *c, double *block)
{
    assert_non_null(block);
    assert_in_range(c->plain_count, 0, sizeof c->plain / sizeof *c->plain - 1);
    c->plain[c->plain_count++] = block;
    return block;
}

void *ops_draw_as(ops_case *c, td_dtype dtype, int64_t count)
{
    return keep(c, td_draw_normal(c->name, c->stream++, dtype, count));
}

void *ops_draw(ops_case *c, int64_t count)
{
    return ops_draw_as(c, c->dtype, count);
}

int64_t *ops_draw_ids(ops_case *c, int64_t count, int64_t bound)
{
    return keep(c, td_draw_tokens(c->name, c->stream++, count, bound));
}

void *ops_bytes(ops_case *c, size_t bytes)
{
    return keep(c, td_fence_alloc(bytes));
}

void *ops_room(ops_case *c, td_dtype dtype, int64_t count)
{
    return ops_bytes(c, (size_t)count * td_dtype_size(dtype));
}

void *ops_copy(ops_case *c, td_dtype dtype, const void *data, int64_t count)
{
    return memcpy(ops_room(c, dtype, count), data, (size_t)count * td_dtype_size(dtype));
}

double *ops_f64(ops_case *c, td_dtype dtype, const void *data, int64_t count)
{
    return keep_plain(c, td_as_f64(dtype, data, count));
}

double *ops_zeros(ops_case *c, int64_t count)
{
    return keep_plain(c, calloc((size_t)count, sizeof(double)));
}

void ops_assert_close(const ops_case *c, const char *tensor, td_dtype dtype, const void *got,
                      const double *truth, int64_t count, double units)
{
    char name[256];

    snprintf(name, sizeof name, "%s: %s", c->name, tensor);
    td_assert_close(name, dtype, got, truth, count, dtype == TD_BF16 ? 0x1.01p-8 : units * 0x1p-23);
}

double ops_dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;

    for (int64_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

int ops_run_cases(const char *group, const void *cases, size_t count, size_t size, CMUnitTestFunction test)
{
    struct CMUnitTest *tests = calloc(count, sizeof *tests);
    int failed;

    if (!tests)
        return 1;
    for (size_t i = 0; i < count; i++) {
        const char *one = (const char *)cases + i * size;

        tests[i].name = one;
        tests[i].test_func = test;
        tests[i].initial_state = (void *)one;
    }
    failed = _cmocka_run_group_tests(group, tests, count, NULL, NULL);
    free(tests);
    return failed;
}
