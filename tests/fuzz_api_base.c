/* The functions of base/: status, clock, types, random numbers, statistics. fuzz_api_files.c
 * tests files of tensors. */
#include "support/fuzz_api_kit.h"

#include "base/build.h"
#include "base/clock.h"
#include "base/rng.h"
#include "base/stats.h"

/* ---- status, clock, dtype ---- */

API_NAMES(td_status, td_status_name, "TD_OK", "TD_BAD_ARGUMENT", "TD_NO_MEMORY", "TD_UNSUPPORTED",
          "TD_IO_ERROR", "TD_LIBRARY_ERROR", "TD_BAD_STATE", "TD_RANK_FAILED")

API(td_last_error)
{
    assert_non_null(td_last_error());
    return TD_OK;
}

API(td_build_info)
{
    const td_build *build = td_build_info();

    assert_true(build && build == td_build_info() && *build->version && *build->id);
    assert_true(build->modules && build->module_count > 0);
    return TD_OK;
}

API(td_build_interface)
{
    assert_int_equal(strlen(td_build_interface()), 16);
    return TD_OK;
}

API(td_clock_ns)
{
    const int64_t first = td_clock_ns();

    assert_true(td_clock_ns() >= first);
    return TD_OK;
}

API_NAMES(td_dtype, td_dtype_name, "f64", "f32", "f16", "bf16")

API_NAMES(td_precision, td_precision_name, "f32", "tf32", "bf16", "f16", "bf16_mixed")

API_PARSE(td_precision, td_precision_parse, "name|precision", "f32", "tf32", "bf16", "f16", "bf16_mixed")

API(td_precision_dtype)
{
    assert_true(td_dtype_size(td_precision_dtype((td_precision)any_enum(5))) > 0);
    return TD_OK;
}

API(td_precision_weights)
{
    const td_precision precision = (td_precision)any_enum(5);

    assert_true(td_dtype_size(td_precision_weights(precision)) >=
                td_dtype_size(td_precision_dtype(precision)));
    return TD_OK;
}

API(td_dtype_size)
{
    const int value = any_enum(4);

    assert_int_equal(td_dtype_size((td_dtype)value) > 0, value >= 0 && value < 4);
    return TD_OK;
}

API(td_dtype_eps)
{
    const int value = any_enum(4);

    assert_int_equal(td_dtype_eps((td_dtype)value) > 0, value >= 0 && value < 4);
    return TD_OK;
}

API_PARSE(td_dtype, td_dtype_parse, "name|dtype", "f64", "f32", "f16", "bf16")

API(td_convert)
{
    const int64_t count = index_in("count", 64);
    const td_dtype from = dtype_any("src_dtype"), to = dtype_any("dst_dtype");
    const void *src = count ? in("src", BYTES(from, count)) : NULL;
    void *dst = count ? out("dst", BYTES(to, count)) : NULL;

    return td_convert(count, from, src, to, dst);
}

/* ---- random numbers ---- */

API(td_philox4x32_10)
{
    const uint32_t counter[4] = {(uint32_t)td_fuzz_bits(), 0, UINT32_MAX, 7},
                   key[2] = {(uint32_t)td_fuzz_bits(), 1};
    uint32_t first[4] = {0}, again[4] = {1, 1, 1, 1};

    td_philox4x32_10(counter, key, first);
    td_philox4x32_10(counter, key, again);
    assert_memory_equal(first, again, sizeof first);
    return TD_OK;
}

typedef struct slice {
    td_rng rng;
    int64_t offset, count;
} slice;

static slice draw_slice(void)
{
    slice s = {.rng = {td_fuzz_bits(), td_fuzz_bits()},
               .offset = index_in("offset", 1000),
               .count = index_in("count", 64)};

    if (td_fuzz_chance(10) && !api_spoilt() && s.count > 0) {
        s.offset = INT64_MAX - s.count + (wrong() ? 1 : 0);
        impossible_if(s.offset > INT64_MAX - s.count, "offset|count");
    }
    return s;
}

static size_t slice_bytes(const slice *s, size_t element)
{
    return s->count > 0 ? (size_t)s->count * element : 8;
}

API(td_rng_uniform)
{
    const slice s = draw_slice();
    const double first = number("low"), second = number("high|low");
    const bool ordered = !(first > second); /* true for NaN */
    const double low = ordered ? first : second, high = ordered ? second : first;
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    return td_rng_uniform(pointer("rng", &s.rng), s.offset, s.count, (float)low, (float)high, to);
}

static double draw_std(void)
{
    static const double good[] = {0, 1, 1e-45, 0.5}, bad[] = {-1, NAN, INFINITY, -INFINITY};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    impossible(TD_BAD_ARGUMENT, "std");
    return BAD(bad);
}

API(td_rng_normal)
{
    const slice s = draw_slice();
    const double mean = number("mean"), std = draw_std();
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    return td_rng_normal(pointer("rng", &s.rng), s.offset, s.count, (float)mean, (float)std, to);
}

API(td_rng_truncated_normal)
{
    const slice s = draw_slice();
    const double mean = number("mean"), std = draw_std(), low = number("low"), high = number("high|low");
    void *to = s.count ? out("out", slice_bytes(&s, 4)) : NULL;

    impossible_if(low > high, "low|high");
    possible(TD_BAD_ARGUMENT, "low|high"); /* more than 10 std from mean */
    return td_rng_truncated_normal(pointer("rng", &s.rng), s.offset, s.count, (float)mean, (float)std,
                                   (float)low, (float)high, to);
}

API(td_rng_tokens)
{
    static const int64_t good[] = {1, 2, 10000, INT64_MAX};
    const slice s = draw_slice();
    int64_t bound = TD_FUZZ_PICK(good);
    void *to = s.count ? out("out", slice_bytes(&s, 8)) : NULL;

    SPOIL(bound, "bound", 0, -1, INT64_MIN);
    return td_rng_tokens(pointer("rng", &s.rng), s.offset, s.count, bound, to);
}

/* ---- statistics ---- */

API(td_stats_compute)
{
    const int64_t count = draw_count();
    const double *samples = draw_samples("samples", count);

    return td_stats_compute(samples, count, out("out", sizeof(td_stats)));
}
