#include "base/check.h"
#include "base/names.h"
#include "transformer/saving.h"

static const struct {
    const char *name;
    td_model_size size;
} sizes[] = {
    {"small", {.d_model = 768, .d_ff = 3072, .layers = 12, .heads = 12, .vocab = 10000}},
    {"medium", {.d_model = 1024, .d_ff = 4096, .layers = 24, .heads = 16, .vocab = 10000}},
    {"large", {.d_model = 1280, .d_ff = 5120, .layers = 36, .heads = 20, .vocab = 10000}},
    {"xl", {.d_model = 1600, .d_ff = 6400, .layers = 48, .heads = 25, .vocab = 10000}},
    {"2.7B", {.d_model = 2560, .d_ff = 10240, .layers = 32, .heads = 32, .vocab = 10000}},
    {"8B", {.d_model = 4096, .d_ff = 11008, .layers = 34, .heads = 32, .vocab = 151936}},
    {"10B", {.d_model = 4608, .d_ff = 12288, .layers = 50, .heads = 36, .vocab = 10000}},
};

#define SIZES ((int64_t)(sizeof sizes / sizeof *sizes))

int64_t td_saving_bytes(void)
{
    return (int64_t)16 << 20;
}

const char *td_model_size_name(int64_t index)
{
    return index >= 0 && index < SIZES ? sizes[index].name : NULL;
}

td_status td_model_size_find(const char *name, td_model_size *out)
{
    td_status status = TD_OK;
    int found;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_names_find("name", &sizes[0].name, sizeof *sizes, SIZES, name, &found));
    *out = sizes[found].size;
cleanup:
    return status;
}

static const char *const keeps[] = {[TD_KEEP_MOST] = "most",
                                    [TD_KEEP_ALL] = "all",
                                    [TD_KEEP_INPUTS] = "inputs",
                                    [TD_KEEP_ATTENTION] = "attention"};

const char *td_keep_name(td_keep keep)
{
    return (unsigned)keep <= TD_KEEP_ATTENTION ? keeps[keep] : NULL;
}

td_status td_keep_parse(const char *name, td_keep *out)
{
    return td_names_find("keep", keeps, sizeof *keeps, TD_KEEP_ATTENTION + 1, name, (int *)out);
}
