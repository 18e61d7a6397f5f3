#include "support/ops_kit.h"

#include "support/gpu.h"

td_device *ops_dev;
int ops_dtype_count = 2;
td_dtype ops_dtypes[3] = {TD_F32, TD_BF16, TD_F16};

/* The fenced tensors of the running case. mirror NULL: the device is the CPU and uses `host`. */
static struct block {
    void *host, *mirror;
    size_t bytes;
} blocks[192];
static int block_count;
static char running[sizeof((ops_case *)0)->name]; /* the case's name, until it is finished */
static bool gpu;

void ops_open(const char *name)
{
    gpu = strcmp(name, "cpu") != 0;
    if (gpu) {
        ops_dev = td_gpu_open();
        ops_dtype_count = 3;
    } else if (td_device_open(name, &ops_dev) != TD_OK) {
        fprintf(stderr, "%s: %s\n", name, td_last_error());
        exit(1);
    }
}

bool ops_on_gpu(void)
{
    return gpu;
}

ops_case ops_begin(td_dtype dtype, const char *format, ...)
{
    ops_case c = {.dtype = dtype};
    va_list args;

    va_start(args, format);
    vsnprintf(c.name, sizeof c.name, format, args);
    va_end(args);
    memcpy(running, c.name, sizeof running);
    return c;
}

void ops_finish(ops_case *c)
{
    while (block_count > 0) {
        struct block *block = &blocks[--block_count];

        td_gpu_free(ops_dev, block->mirror);
        td_fence_free(block->host);
    }
    for (int i = 0; i < c->plain_count; i++)
        free(c->plain[i]);
    *running = '\0';
}

static void *keep(void *host, size_t bytes)
{
    assert_in_range(block_count, 0, sizeof blocks / sizeof *blocks - 1);
    blocks[block_count++] = (struct block){
        .host = host, .mirror = gpu ? td_gpu_block(ops_dev, host, bytes) : NULL, .bytes = bytes};
    return host;
}

void *on(const void *tensor)
{
    const char *address = tensor;

    if (!gpu || !tensor)
        return (void *)tensor;
    for (int i = 0; i < block_count; i++) {
        const char *start = blocks[i].host;

        if (address >= start && address < start + blocks[i].bytes)
            return (char *)blocks[i].mirror + (address - start);
    }
    fail_msg("%p is in no tensor of the case", tensor);
    return NULL;
}

void ops_upload(void)
{
    for (int i = 0; gpu && i < block_count; i++)
        td_assert_ok(td_device_upload(ops_dev, blocks[i].mirror, blocks[i].host, blocks[i].bytes));
}

void ops_download(void)
{
    for (int i = 0; gpu && i < block_count; i++) {
        void *got = td_gpu_read(ops_dev, blocks[i].mirror, blocks[i].bytes);

        memcpy(blocks[i].host, got, blocks[i].bytes);
        free(got);
    }
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
    return keep(td_draw_normal(c->name, c->stream++, dtype, count), (size_t)count * td_dtype_size(dtype));
}

void *ops_draw(ops_case *c, int64_t count)
{
    return ops_draw_as(c, c->dtype, count);
}

int64_t *ops_draw_ids(ops_case *c, int64_t count, int64_t bound)
{
    return keep(td_draw_tokens(c->name, c->stream++, count, bound), (size_t)count * sizeof(int64_t));
}

void *ops_bytes(ops_case *c, size_t bytes)
{
    (void)c;
    return keep(td_fence_alloc(bytes), bytes);
}

void *ops_room(ops_case *c, td_dtype dtype, int64_t count)
{
    return ops_bytes(c, (size_t)count * td_dtype_size(dtype));
}

td_adamw *ops_adamw(ops_case *c, td_adamw adamw)
{
    return memcpy(ops_bytes(c, sizeof adamw), &adamw, sizeof adamw);
}

td_sgd *ops_sgd(ops_case *c, double lr)
{
    const td_sgd sgd = {.lr = lr};

    return memcpy(ops_bytes(c, sizeof sgd), &sgd, sizeof sgd);
}

td_update_state *ops_state(ops_case *c, int64_t step, float gain)
{
    const td_update_state state = {.step = step, .gain = gain};

    return memcpy(ops_bytes(c, sizeof state), &state, sizeof state);
}

void *ops_copy(ops_case *c, td_dtype dtype, const void *data, int64_t count)
{
    const size_t bytes = (size_t)count * td_dtype_size(dtype);

    (void)c;
    return keep(memcpy(td_fence_alloc(bytes), data, bytes), bytes);
}

void *ops_given(ops_case *c, td_dtype dtype, int64_t count, const float *values)
{
    void *block = ops_room(c, dtype, count);

    td_assert_ok(td_convert(count, TD_F32, values, dtype, block));
    return block;
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
    td_assert_close(name, dtype, got, truth, count,
                    dtype == TD_BF16  ? 0x1.01p-8
                    : dtype == TD_F16 ? 0x1.01p-11
                                      : units * 0x1p-23);
}

double ops_dot(const double *a, const double *b, int64_t count)
{
    double sum = 0;

    for (int64_t i = 0; i < count; i++)
        sum += a[i] * b[i];
    return sum;
}

/* Prints the case, because some assertions do not know it. */
static int say_what_failed(void **state)
{
    (void)state;
    if (*running)
        print_error("in the case '%s'\n", running);
    *running = '\0';
    return 0;
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
        tests[i].teardown_func = say_what_failed;
        tests[i].initial_state = (void *)one;
    }
    failed = _cmocka_run_group_tests(group, tests, count, NULL, NULL);
    free(tests);
    return failed;
}

void ops_adamw_truth(const td_adamw *a, const td_update_state *state, int64_t count, double *p,
                     const double *g, double *m, double *v)
{
    double correction1 = 1 - pow(a->beta1, (double)state->step),
           correction2 = 1 - pow(a->beta2, (double)state->step);

    for (int64_t i = 0; i < count; i++) {
        double grad = (double)state->gain * g[i];

        m[i] = a->beta1 * m[i] + (1 - a->beta1) * grad;
        v[i] = a->beta2 * v[i] + (1 - a->beta2) * grad * grad;
        if (a->variant != TD_ADAMW_COURSE2025)
            p[i] -= a->lr * a->weight_decay * p[i];
        if (a->variant == TD_ADAMW_TORCH)
            p[i] -= a->lr / correction1 * m[i] / (sqrt(v[i] / correction2) + a->eps);
        else
            p[i] -= a->lr * sqrt(correction2) / correction1 * m[i] / (sqrt(v[i]) + a->eps);
        if (a->variant == TD_ADAMW_COURSE2025)
            p[i] -= a->lr * a->weight_decay * p[i];
    }
}
