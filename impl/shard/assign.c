/* Assigns whole tensors to ranks, the largest first. */
#include "base/check.h"
#include "shard/shard.h"

#include <stdlib.h>

typedef struct sized {
    int64_t elements, index;
} sized;

static int largest_first(const void *a, const void *b)
{
    const sized *x = a, *y = b;

    if (x->elements != y->elements)
        return x->elements > y->elements ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static td_status check_sizes(int64_t count, const int64_t *elements, int32_t ranks, const int64_t *loads)
{
    td_status status = TD_OK;
    int64_t all = 0;

    TD_CHECK(ranks >= 1 && ranks <= TD_COMM_MOST_RANKS, "ranks is %d, needs 1 to %d", (int)ranks,
             TD_COMM_MOST_RANKS);
    TD_CHECK(count >= 0 && count <= INT32_MAX, "count is %" PRId64 ", needs 0 to %d", count, INT32_MAX);
    TD_CHECK(elements || count == 0, "elements is NULL");
    TD_CHECK(loads, "loads is NULL");
    for (int32_t rank = 0; rank < ranks; rank++) {
        TD_CHECK(loads[rank] >= 0 && loads[rank] <= INT64_MAX - all,
                 "loads[%d] is %" PRId64 ", needs at least 0, and at most 2^63 - 1 with those before",
                 (int)rank, loads[rank]);
        all += loads[rank];
    }
    for (int64_t i = 0; i < count; i++) {
        TD_CHECK(elements[i] >= 0 && elements[i] <= INT64_MAX - all,
                 "elements[%" PRId64 "] is %" PRId64
                 ", needs at least 0, and at most 2^63 - 1 with all others",
                 i, elements[i]);
        all += elements[i];
    }
cleanup:
    return status;
}

td_status td_shard_assign(int64_t count, const int64_t *elements, int32_t ranks, int64_t *loads,
                          int32_t *owners)
{
    td_status status = TD_OK;
    sized *sorted = NULL;

    TD_TRY(check_sizes(count, elements, ranks, loads));
    TD_CHECK(owners || count == 0, "owners is NULL");
    sorted = calloc((size_t)count + 1, sizeof *sorted);
    TD_FAIL_IF(!sorted, TD_NO_MEMORY, "no host memory for %" PRId64 " tensors", count);
    for (int64_t i = 0; i < count; i++)
        sorted[i] = (sized){elements[i], i};
    qsort(sorted, (size_t)count, sizeof *sorted, largest_first);
    for (int64_t i = 0; i < count; i++) {
        int32_t least = 0;

        for (int32_t rank = 1; rank < ranks; rank++)
            if (loads[rank] < loads[least])
                least = rank;
        owners[sorted[i].index] = least;
        loads[least] += sorted[i].elements;
    }
cleanup:
    free(sorted);
    return status;
}
