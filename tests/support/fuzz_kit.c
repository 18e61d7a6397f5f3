#include "support/fuzz_kit.h"

#include "base/rng.h"
#include "support/gpu.h"
#include "support/guard.h"

fuzz_kind fuzz_kinds[FUZZ_MOST_KINDS];
int fuzz_kind_count;

void fuzz_add(fuzz_kind kind)
{
    if (fuzz_kind_count == FUZZ_MOST_KINDS)
        abort();
    fuzz_kinds[fuzz_kind_count++] = kind;
}

td_device *fuzz_dev;

enum { SLACK_BYTE = 0xA5, POISON_BYTE = 0xFF, MOST_TENSORS = 24 };

static fuzz_tensor tensors[MOST_TENSORS];
static int tensor_count;
static bool gpu;
static double worst;
static const int64_t *named; /* extents that are not drawn, up to the first 0; NULL: none */

void fuzz_open(const char *name)
{
    gpu = strcmp(name, "cpu") != 0;
    if (gpu)
        fuzz_dev = td_gpu_open();
    else
        td_assert_ok(td_device_open(name, &fuzz_dev));
}

bool fuzz_on_gpu(void)
{
    return gpu;
}

td_dtype fuzz_16bit(void)
{
    return gpu && td_fuzz_chance(50) ? TD_F16 : TD_BF16;
}

td_dtype fuzz_dtype(void)
{
    return td_fuzz_chance(50) ? TD_F32 : fuzz_16bit();
}

void fuzz_name_extents(const int64_t *extents)
{
    named = extents;
}

int64_t fuzz_named_or(int64_t drawn)
{
    return named && *named > 0 ? *named++ : drawn;
}

int64_t fuzz_extent(int64_t most)
{
    static const int64_t small[] = {1, 1, 2, 3, 4, 5, 7, 8};
    static const int64_t tiles[] = {16, 32, 48, 64, 128, 256, 512};
    static const int64_t primes[] = {11, 13,  17,  23,  31,  37,  53,  61, 67,
                                     97, 127, 131, 193, 251, 257, 509, 521};
    int64_t extent;

    switch (td_fuzz_below(4)) {
    case 0:
        extent = TD_FUZZ_PICK(small);
        break;
    case 1:
        extent = TD_FUZZ_PICK(tiles) + td_fuzz_below(3) - 1;
        break;
    case 2:
        extent = TD_FUZZ_PICK(primes);
        break;
    default:
        extent = 1 + td_fuzz_below(most);
    }
    return fuzz_named_or(extent <= most ? extent : 1 + extent % most);
}

int64_t fuzz_pitch(int64_t row)
{
    return fuzz_named_or(td_fuzz_chance(50) ? 0 : row + (td_fuzz_chance(20) ? 0 : td_fuzz_below(19)));
}

/* ---- tensors ---- */

static void *copy_of(const void *from, size_t bytes)
{
    void *copy = malloc(bytes > 0 ? bytes : 1);

    assert_non_null(copy);
    return from ? memcpy(copy, from, bytes) : memset(copy, POISON_BYTE, bytes);
}

/* Tensors start at any element; scratch on a multiple of 256 bytes. */
static fuzz_tensor *place(fuzz_tensor tensor)
{
    const size_t element = tensor.scratch ? 256 : td_dtype_size(tensor.dtype);
    fuzz_tensor *t = &tensors[tensor_count++];

    assert_in_range(tensor_count, 1, MOST_TENSORS);
    if (gpu) {
        tensor.lead =
            tensor.scratch ? 0 : (size_t)td_fuzz_below(2) * (size_t)(1 + td_fuzz_below(7)) * element;
        void *fill = malloc(tensor.lead + tensor.bytes + 1);

        assert_non_null(fill);
        memset(fill, SLACK_BYTE, tensor.lead);
        memset((char *)fill + tensor.lead, POISON_BYTE, tensor.bytes);
        tensor.block = td_gpu_block(fuzz_dev, fill, tensor.lead + tensor.bytes);
        free(fill);
    } else {
        const bool behind = td_fuzz_chance(60);
        const size_t offset = tensor.scratch ? 0 : (size_t)td_fuzz_below(64) / element * element;

        /* A tensor in front of a page ends exactly there, so it may begin at any address. */
        tensor.block = behind && !tensor.scratch ? td_guard_alloc(tensor.bytes, true, 1, 0)
                                                 : td_guard_alloc(tensor.bytes, behind, 256, offset);
    }
    *t = tensor;
    return t;
}

static fuzz_tensor *make(const char *name, td_dtype dtype, int64_t count, void *before)
{
    fuzz_tensor t = {.name = name, .dtype = dtype, .count = count, .before = before};

    t.bytes = (size_t)count * td_dtype_size(dtype);
    t.after = copy_of(before, t.bytes);
    t.x = malloc((size_t)count * sizeof *t.x);
    t.expect = malloc((size_t)count * sizeof *t.expect);
    assert_non_null(t.x);
    assert_non_null(t.expect);
    td_assert_ok(td_convert(count, dtype, before, TD_F64, t.x));
    for (int64_t i = 0; i < count; i++)
        t.expect[i].square = -1;
    return place(t);
}

fuzz_tensor *fuzz_given(const char *name, td_dtype dtype, int64_t count, const double *values)
{
    void *before = malloc((size_t)count * td_dtype_size(dtype));

    assert_non_null(before);
    td_assert_ok(td_convert(count, TD_F64, values, dtype, before));
    return make(name, dtype, count, before);
}

fuzz_tensor *fuzz_draw(const char *name, td_dtype dtype, int64_t count)
{
    const td_rng rng = {.seed = td_fuzz_bits()};
    const int kind = (int)td_fuzz_below(8);
    const double factor = kind == 1 ? 0.03125 : kind == 2 ? 3.0 : 1.0;
    float *drawn = malloc((size_t)count * sizeof *drawn);
    double *values = malloc((size_t)count * sizeof *values);

    assert_non_null(drawn);
    assert_non_null(values);
    td_assert_ok(td_rng_normal(&rng, 0, count, 0.0f, 1.0f, drawn));
    for (int64_t i = 0; i < count; i++)
        values[i] = kind == 0 ? fabs((double)drawn[i]) : factor * (double)drawn[i];
    fuzz_tensor *t = fuzz_given(name, dtype, count, values);
    free(values);
    free(drawn);
    return t;
}

fuzz_tensor *fuzz_room(const char *name, td_dtype dtype, int64_t count)
{
    return make(name, dtype, count, copy_of(NULL, (size_t)count * td_dtype_size(dtype)));
}

/* Kept as f64, which is as wide, because only the bits count. */
fuzz_tensor *fuzz_ids(const char *name, int64_t count, int64_t bound)
{
    int64_t *ids = malloc((size_t)count * sizeof *ids);

    assert_non_null(ids);
    for (int64_t i = 0; i < count; i++)
        ids[i] = td_fuzz_chance(10) ? bound - 1 : td_fuzz_below(bound);
    return make(name, TD_F64, count, ids);
}

int64_t fuzz_id(const fuzz_tensor *ids, int64_t index)
{
    return ((const int64_t *)ids->before)[index];
}

fuzz_tensor *fuzz_scratch(size_t bytes)
{
    return place((fuzz_tensor){.name = "work", .scratch = true, .bytes = bytes});
}

void *at(const fuzz_tensor *tensor)
{
    return tensor ? tensor->block + tensor->lead : NULL;
}

void fuzz_expect(fuzz_tensor *tensor, int64_t index, td_estimate value)
{
    assert_in_range(index, 0, tensor->count - 1);
    tensor->expect[index] = value;
}

void fuzz_lean(fuzz_tensor *tensor, int64_t index, double units)
{
    if (!tensor->lean)
        tensor->lean = calloc((size_t)tensor->count, sizeof *tensor->lean);
    assert_non_null(tensor->lean);
    tensor->lean[index] = units;
}

void fuzz_expect_exact(fuzz_tensor *tensor, int64_t index, double value)
{
    fuzz_expect(tensor, index, (td_estimate){.value = value, .square = NAN});
}

/* ---- the call ---- */

void fuzz_upload(void)
{
    for (int i = 0; i < tensor_count; i++) {
        const fuzz_tensor *t = &tensors[i];
        void *to = at(t);

        if (t->scratch && gpu)
            td_assert_ok(td_device_fill(fuzz_dev, to, POISON_BYTE, t->bytes));
        else if (t->scratch)
            memset(to, POISON_BYTE, t->bytes);
        else if (gpu)
            td_assert_ok(td_device_upload(fuzz_dev, to, t->before, t->bytes));
        else
            memcpy(to, t->before, t->bytes);
    }
}

void fuzz_download(int round, bool compare)
{
    for (int i = 0; i < tensor_count; i++) {
        fuzz_tensor *t = &tensors[i];
        void *got = gpu ? td_gpu_read(fuzz_dev, t->block, t->lead + t->bytes) : NULL;
        const char *inside = gpu ? (char *)got + t->lead : at(t);

        for (size_t b = 0; b < t->lead; b++)
            if (((unsigned char *)got)[b] != SLACK_BYTE)
                fail_msg("%s: byte %zu before it was written", t->name, t->lead - b);
        if (compare && round > 0 && !t->scratch && memcmp(t->after, inside, t->bytes) != 0)
            td_assert_identical(t->name, t->dtype, t->after, inside, t->count);
        if (!t->scratch)
            memcpy(t->after, inside, t->bytes);
        free(got);
    }
}

void fuzz_accept(fuzz_tensor *t)
{
    char text[512];

    if (!fuzz_judge(t, text, sizeof text))
        fail_msg("%s", text);
    memcpy(t->before, t->after, t->bytes);
    td_assert_ok(td_convert(t->count, t->dtype, t->before, TD_F64, t->x));
    for (int64_t i = 0; i < t->count; i++)
        t->expect[i].square = -1;
    free(t->lean);
    t->lean = NULL;
}

/* ---- the judge ---- */

/* Judges all elements together. The root mean square of a rounding error is u / sqrt(3) for numbers just
 * above a power of two, as all partial sums of positive terms may be. So the norm of many independent errors
 * is at most 0.58 times the norm of their Gammas; 0.75 leaves a margin for errors that neighbours share. A
 * few elements may outweigh all others, such as norms of rows with small numbers. The square of an error has
 * a standard deviation of at most sqrt(2) / 3 of its Gamma's square. The sum of these squares may differ from
 * its mean by six standard deviations. In attention errors are not independent: the error of a row of D
 * affects every key. There the norm was 0.76 and 1.5 once each in 350,000 cases, so 4 is allowed, as for
 * single elements. */
static bool judge_norm(const fuzz_tensor *t, double errors, double squares, double fourths, double stores,
                       double leans, int64_t count, char *text, size_t room)
{
    const double gammas = t->shared ? 4 * squares : 0.75 * 0.75 * squares + 6 * sqrt(2) / 3 * sqrt(fourths);
    const double allowed =
        TD_ULP_HALF * (sqrt(gammas) + sqrt(leans)) + td_dtype_eps(t->dtype) / 2 * sqrt(stores);

    if (count < 64 || errors <= allowed * allowed)
        return true;
    snprintf(text, room, "%s: the norm of %" PRId64 " errors is %.4g, allowed are %.4g", t->name, count,
             sqrt(errors), allowed);
    return false;
}

bool fuzz_judge(const fuzz_tensor *t, char *text, size_t room)
{
    const size_t element = td_dtype_size(t->dtype);
    double *got = td_as_f64(t->dtype, t->after, t->count);
    double errors = 0, squares = 0, fourths = 0, stores = 0, leans = 0;
    int64_t count = 0, i;
    bool right = true;

    for (i = 0; i < t->count && right; i++) {
        const td_estimate want = t->expect[i];
        const double error = fabs(got[i] - want.value);

        if (want.square < 0) {
            right = memcmp((char *)t->after + (size_t)i * element, (char *)t->before + (size_t)i * element,
                           element) == 0;
            if (!right)
                snprintf(text, room, "%s[%" PRId64 "], not to be written, was %.9g and is %.9g", t->name, i,
                         td_value_at(t->dtype, t->before, i), got[i]);
            continue;
        }
        const double store = isnan(want.square) ? 0 : td_allowance(td_exact(want.value), t->dtype);
        const double lean = t->lean ? t->lean[i] : 0;
        const double allowed = isnan(want.square) ? 0 : td_allowance(want, t->dtype) + lean * TD_ULP_HALF;
        right = error <= allowed;
        if (!right)
            snprintf(text, room,
                     "%s[%" PRId64 "] of %" PRId64 " is %.9g, truth %.9g: off by %.4g, allowed are %.4g",
                     t->name, i, t->count, got[i], want.value, error, allowed);
        if (allowed > store) {
            if (allowed - store > 0.01 * store)
                worst = fmax(worst, (error - store) / (allowed - store));
            errors += error * error;
            squares += want.square;
            fourths += want.square * want.square;
            stores += want.value * want.value;
            leans += lean * lean;
            count++;
        }
    }
    free(got);
    return right && judge_norm(t, errors, squares, fourths, stores, leans, count, text, room);
}

double fuzz_worst(void)
{
    const double result = worst;

    worst = 0;
    return result;
}

void fuzz_finish(void)
{
    char text[512];

    for (int i = 0; i < tensor_count; i++)
        if (!tensors[i].scratch && !fuzz_judge(&tensors[i], text, sizeof text))
            fail_msg("%s", text);
    while (tensor_count > 0) {
        fuzz_tensor *t = &tensors[--tensor_count];

        free(t->x);
        free(t->expect);
        free(t->lean);
        free(t->before);
        free(t->after);
        if (gpu)
            td_gpu_free(fuzz_dev, t->block);
        else
            td_guard_free(t->block);
    }
}

/* A drawn element, as an estimate without error. */
td_estimate given(const fuzz_tensor *t, int64_t index)
{
    return td_exact(t->x[index]);
}

fuzz_tensor *work_of(td_status status, const size_t *bytes)
{
    td_assert_ok(status);
    return *bytes > 0 || td_fuzz_chance(50) ? fuzz_scratch(*bytes) : NULL;
}

/* Expects that the elements of `rounded` are the `values`, rounded. */
void expect_rounded(fuzz_tensor *rounded, const double *values)
{
    void *bits = malloc(rounded->bytes);

    assert_non_null(bits);
    td_assert_ok(td_convert(rounded->count, TD_F64, values, rounded->dtype, bits));
    double *back = td_as_f64(rounded->dtype, bits, rounded->count);
    for (int64_t i = 0; i < rounded->count; i++)
        fuzz_expect_exact(rounded, i, back[i]);
    free(back);
    free(bits);
}

/* Expects a + b, rounded. */
void expect_added(fuzz_tensor *sum, const fuzz_tensor *a, const fuzz_tensor *b)
{
    double *values = malloc((size_t)sum->count * sizeof *values);

    assert_non_null(values);
    for (int64_t i = 0; i < sum->count; i++)
        values[i] = (double)(float)(a->x[i] + b->x[i]); /* exact in float64, or nearly so */
    expect_rounded(sum, values);
    free(values);
}

const char *flag(bool set, const char *name)
{
    return set ? name : "";
}
