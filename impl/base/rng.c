#include "base/rng.h"

#include "base/check.h"

#include <math.h>

__extension__ typedef unsigned __int128 uint128;

void td_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < 10; round++) {
        uint64_t even = (uint64_t)c0 * 0xD2511F53u;
        uint64_t odd = (uint64_t)c2 * 0xCD9E8D57u;

        c0 = (uint32_t)(odd >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)odd;
        c2 = (uint32_t)(even >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)even;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

static void block(const td_rng *rng, int64_t index, uint32_t words[4])
{
    const uint32_t counter[4] = {(uint32_t)index, (uint32_t)((uint64_t)index >> 32), (uint32_t)rng->stream,
                                 (uint32_t)(rng->stream >> 32)};
    const uint32_t key[2] = {(uint32_t)rng->seed, (uint32_t)(rng->seed >> 32)};

    td_philox4x32_10(counter, key, words);
}

static td_status check_slice(const td_rng *rng, int64_t offset, int64_t count, const void *out)
{
    td_status status = TD_OK;

    TD_CHECK(rng, "rng is NULL");
    TD_CHECK(offset >= 0, "offset is %" PRId64 ", needs at least 0", offset);
    TD_CHECK(count >= 0, "count is %" PRId64 ", needs at least 0", count);
    TD_CHECK(count <= INT64_MAX - offset, "offset %" PRId64 " + count %" PRId64 " is beyond 2^63 - 1", offset,
             count);
    TD_CHECK(out || count == 0, "out is NULL, count is %" PRId64, count);
cleanup:
    return status;
}

td_status td_rng_uniform(const td_rng *rng, int64_t offset, int64_t count, float low, float high, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_CHECK(isfinite(low) && isfinite(high) && low <= high,
             "range is [%g, %g), needs finite bounds in order", low, high);
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];

        block(rng, (offset + i) / 4, words);
        out[i] = low + (high - low) * ((float)(words[(offset + i) % 4] >> 8) * 0x1p-24f);
    }
cleanup:
    return status;
}

td_status td_rng_normal(const td_rng *rng, int64_t offset, int64_t count, float mean, float std, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_CHECK(isfinite(mean), "mean is %g, needs a finite number", mean);
    TD_CHECK(isfinite(std) && std >= 0, "std is %g, needs a finite number of at least 0", std);
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];

        block(rng, (offset + i) / 4, words);
        int64_t pair = (offset + i) % 4 / 2 * 2;
        float radius = sqrtf(-2.0f * logf(((float)(words[pair] >> 8) + 1.0f) * 0x1p-24f));
        float angle = 0x1.921fb6p2f * ((float)(words[pair + 1] >> 8) * 0x1p-24f);
        out[i] = mean + std * radius * ((offset + i) % 2 ? sinf(angle) : cosf(angle));
    }
cleanup:
    return status;
}

td_status td_rng_truncated_normal(const td_rng *rng, int64_t offset, int64_t count, float mean, float std,
                                  float low, float high, float *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_CHECK(isfinite(mean), "mean is %g, needs a finite number", mean);
    TD_CHECK(isfinite(std) && std >= 0, "std is %g, needs a finite number of at least 0", std);
    TD_CHECK(isfinite(low) && isfinite(high) && low <= high,
             "range is [%g, %g], needs finite bounds in order", low, high);
    double from = 0.5 * erfc(-((double)low - mean) / std * M_SQRT1_2);
    double to = 0.5 * erfc(-((double)high - mean) / std * M_SQRT1_2);
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];

        block(rng, (offset + i) / 4, words);
        double p = from + (to - from) * ((double)words[(offset + i) % 4] + 0.5) * 0x1p-32;
        double x = 0;
        for (int step = 0; step < 30; step++)
            x -= (0.5 * erfc(-x * M_SQRT1_2) - p) / fmax(exp(-0.5 * x * x) * 0.3989422804014327, 0.05);
        out[i] = fminf(fmaxf((float)(mean + std * x), low), high);
    }
cleanup:
    return status;
}

td_status td_rng_tokens(const td_rng *rng, int64_t offset, int64_t count, int64_t bound, int64_t *out)
{
    td_status status = TD_OK;

    TD_TRY(check_slice(rng, offset, count, out));
    TD_CHECK(bound >= 1, "bound is %" PRId64 ", needs at least 1", bound);
    for (int64_t i = 0; i < count; i++) {
        uint32_t words[4];

        block(rng, (offset + i) / 2, words);
        int64_t pair = (offset + i) % 2 * 2;
        uint64_t random = words[pair] | (uint64_t)words[pair + 1] << 32;
        out[i] = (int64_t)(((uint128)random * (uint64_t)bound) >> 64);
    }
cleanup:
    return status;
}
