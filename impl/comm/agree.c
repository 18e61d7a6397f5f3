#include "comm/agree.h"

#include "base/check.h"
#include "comm/control.h"

#include <stdlib.h>

td_status td_comm_compare(td_comm *comm, const td_rows *rows)
{
    const int64_t most = TD_CONTROL_VALUE / (int64_t)rows->size;
    const int64_t room = rows->count < most ? rows->count : most;
    td_status status = TD_OK;
    td_comm_info info;
    char *all = NULL;

    TD_TRY(td_comm_describe(comm, &info));
    all = calloc((size_t)(room * (info.ranks + 1)) + 1, rows->size);
    TD_FAIL_IF(!all, TD_NO_MEMORY, "no host memory to compare %d ranks", (int)info.ranks);
    char *const mine = all + (size_t)(room * info.ranks) * rows->size;
    for (int64_t begin = 0; begin < rows->count; begin += room) {
        const int64_t here = rows->count - begin < room ? rows->count - begin : room;

        for (int64_t i = 0; i < here; i++)
            TD_TRY(rows->make(rows->user, begin + i, mine + (size_t)i * rows->size));
        TD_TRY(td_comm_exchange(comm, mine, (size_t)here * rows->size, all));
        for (int64_t i = 0; i < here; i++)
            for (int32_t rank = 1; rank < info.ranks; rank++)
                TD_TRY(rows->look(rows->user, begin + i, rank, all + (size_t)i * rows->size,
                                  all + (size_t)(rank * here + i) * rows->size));
    }
cleanup:
    free(all);
    return status;
}

static td_status value_of(void *user, int64_t index, void *row)
{
    *(double *)row = (*(const td_setting **)user)[index].value;
    return TD_OK;
}

static td_status compare_values(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    const double odd = *(const double *)row, usual = *(const double *)first;
    td_status status = TD_OK;

    TD_CHECK(odd == usual, "%s: rank %d has %.17g, where rank 0 has %.17g",
             (*(const td_setting **)user)[index].name, (int)rank, odd, usual);
cleanup:
    return status;
}

td_status td_comm_agree(td_comm *comm, int64_t count, const td_setting *settings)
{
    return td_comm_compare(comm, &(td_rows){count, sizeof(double), value_of, compare_values, &settings});
}
