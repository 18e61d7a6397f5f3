#include "support/draw.h"

#include "base/rng.h"
#include "support/compare.h"
#include "support/fence.h"
#include "support/test.h"

uint64_t td_seed(const char *name)
{
    uint64_t hash = 0xCBF29CE484222325u; /* FNV-1a, 64 bits: offset basis and prime */

    for (; *name; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001B3u;
    return hash;
}

void *td_draw_normal(const char *name, uint64_t stream, td_dtype dtype, int64_t count)
{
    td_rng rng = {.seed = td_seed(name), .stream = stream};
    float *drawn = malloc((size_t)(count > 0 ? count : 1) * sizeof *drawn);
    void *block = td_fence_alloc((size_t)count * td_dtype_size(dtype));

    assert_non_null(drawn);
    td_assert_ok(td_rng_normal(&rng, 0, count, 0.0f, 1.0f, drawn));
    td_assert_ok(td_convert(count, TD_F32, drawn, dtype, block));
    free(drawn);
    return block;
}

int64_t *td_draw_tokens(const char *name, uint64_t stream, int64_t count, int64_t bound)
{
    td_rng rng = {.seed = td_seed(name), .stream = stream};
    int64_t *block = td_fence_alloc((size_t)count * sizeof *block);

    td_assert_ok(td_rng_tokens(&rng, 0, count, bound, block));
    return block;
}

double *td_as_f64(td_dtype dtype, const void *data, int64_t count)
{
    double *values = malloc((size_t)(count > 0 ? count : 1) * sizeof *values);

    assert_non_null(values);
    td_assert_ok(td_convert(count, dtype, data, TD_F64, values));
    return values;
}
