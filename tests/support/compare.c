#include "support/compare.h"

#include "support/draw.h"
#include "support/test.h"

#include <math.h>

double td_value_at(td_dtype dtype, const void *data, int64_t index)
{
    double value = NAN;

    td_assert_ok(
        td_convert(1, dtype, (const char *)data + (size_t)index * td_dtype_size(dtype), TD_F64, &value));
    return value;
}

/* The sign of NaN does not count here, because the processor chooses it. */
static bool same_kind(double got, double truth)
{
    if (isnan(truth))
        return isnan(got);
    if (isinf(truth))
        return isinf(got) && signbit(got) == signbit(truth);
    return isfinite(got);
}

td_error td_measure(td_dtype dtype, const void *got, const double *truth, int64_t count)
{
    td_error error = {.finite_matches = true};
    double error_squares = 0, truth_squares = 0;
    double *values = td_as_f64(dtype, got, count);

    for (int64_t i = 0; i < count; i++) {
        if (!same_kind(values[i], truth[i])) {
            if (error.finite_matches)
                error.worst = i;
            error.finite_matches = false;
        } else if (isfinite(truth[i])) {
            double distance = fabs(values[i] - truth[i]);

            error_squares += distance * distance;
            truth_squares += truth[i] * truth[i];
            if (distance > error.max_abs) {
                error.max_abs = distance;
                error.worst = error.finite_matches ? i : error.worst;
            }
        }
    }
    free(values);
    error.rel_l2 = error_squares == 0 ? 0 : sqrt(error_squares / truth_squares);
    return error;
}

void td_check_close(const char *name, td_dtype dtype, const void *got, const double *truth, int64_t count,
                    double tolerance, const char *file, int line)
{
    td_error error = td_measure(dtype, got, truth, count);
    double largest = 0;

    for (int64_t i = 0; i < count; i++)
        if (isfinite(truth[i]) && fabs(truth[i]) > largest)
            largest = fabs(truth[i]);
    if (error.finite_matches && error.rel_l2 <= tolerance && error.max_abs <= tolerance * largest * 8)
        return;
    print_error(
        "%s[%lld] is %.9g, truth %.9g; over %lld elements rel_l2 %.3g, max_abs %.3g, tolerance %.3g%s\n",
        name, (long long)error.worst, td_value_at(dtype, got, error.worst), truth[error.worst],
        (long long)count, error.rel_l2, error.max_abs, tolerance,
        error.finite_matches ? "" : "; NaN or infinity in the wrong place");
    _fail(file, line);
}

void td_check_identical(const char *name, td_dtype dtype, const void *a, const void *b, int64_t count,
                        const char *file, int line)
{
    const size_t size = td_dtype_size(dtype);

    if (memcmp(a, b, (size_t)count * size) == 0)
        return;
    for (int64_t i = 0; i < count; i++)
        if (memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) != 0) {
            print_error("%s[%lld] is %.9g in one and %.9g in the other\n", name, (long long)i,
                        td_value_at(dtype, a, i), td_value_at(dtype, b, i));
            _fail(file, line);
        }
}

void td_forget_error(void)
{
    td_dtype ignored;

    (void)td_dtype_parse("(no message)", &ignored);
}

void td_check_refused(const char *text, td_status got, td_status want, const char *words, const char *file,
                      int line)
{
    if (got == want && strlen(words) >= TD_LEAST_WORDS && strstr(td_last_error(), words))
        return;
    print_error("%s\n  returned %s, needs %s\n  message '%s', needs the words '%s'\n", text,
                td_status_name(got), td_status_name(want), td_last_error(), words);
    _fail(file, line);
}

void td_check_ok(const char *text, td_status got, const char *file, int line)
{
    if (got == TD_OK)
        return;
    print_error("%s\n  returned %s: %s\n", text, td_status_name(got), td_last_error());
    _fail(file, line);
}
