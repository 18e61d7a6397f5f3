#include "base/names.h"

#include "base/check.h"
#include "base/setting.h"

#include <stdio.h>
#include <string.h>

static const char *name_at(const char *const *first, size_t stride, int i)
{
    return *(const char *const *)((const char *)first + (size_t)i * stride);
}

td_status td_names_find(const char *what, const char *const *first, size_t stride, int count,
                        const char *name, int *out)
{
    td_status status = TD_OK;
    char known[160] = "";

    TD_NOT_NULL(out, name);
    for (int i = 0; i < count; i++) {
        if (strcmp(name, name_at(first, stride, i)) == 0) {
            *out = i;
            goto cleanup;
        }
    }
    for (int i = 0, end = 0; i < count && end < (int)sizeof known; i++) {
        const char *const between = i + 1 < count ? ", " : " or ";

        end += snprintf(known + end, sizeof known - (size_t)end, "%s%s", i == 0 ? "" : between,
                        name_at(first, stride, i));
    }
    TD_CHECK(false, "%s is '%.32s', needs %s", what, name, known);
cleanup:
    return status;
}

uint64_t td_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ byte[i]) * UINT64_C(1099511628211);
    return hash;
}
