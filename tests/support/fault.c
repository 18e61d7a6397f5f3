#include "support/fault.h"
#include "support/test.h"

#include <inttypes.h>

static int64_t calls, fails_at;
static const char *failed;

void td_fault_at(int64_t nth)
{
    calls = 0;
    fails_at = nth;
    failed = NULL;
}

bool td_fault(const char *name)
{
    if (++calls != fails_at)
        return false;
    failed = name;
    return true;
}

const char *td_fault_name(void)
{
    return failed;
}

/* Doubles of the library's functions bear their names. */
static bool is_allocation(const char *name)
{
    static const char *const names[] = {"malloc", "calloc", "realloc", "strdup", "vasprintf"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0)
            return true;
    return false;
}

static bool expects(const td_fault_loop *loop, const char *name, td_status status)
{
    if (!name)
        return status == TD_OK;
    if (!is_allocation(name))
        return status == TD_IO_ERROR;
    return status == TD_NO_MEMORY || (loop->may_go_on && status == TD_OK);
}

void td_fault_each(const td_fault_loop *loop, void *state)
{
    const char *name = "";
    int64_t nth = 0;

    while (name) {
        if (loop->prepare)
            loop->prepare(state);
        td_fault_at(++nth);
        const td_status status = loop->run(state);
        name = td_fault_name();
        td_fault_at(0);
        if (!expects(loop, name, status))
            fail_msg("%s: call %" PRId64 ", %s, failed, and it returned %d: %s", loop->name, nth,
                     name ? name : "none", (int)status, td_last_error());
        if (loop->check)
            loop->check(state, status, name);
    }
    if (nth <= loop->least)
        fail_msg("%s: %" PRId64 " runs, needs more than %" PRId64, loop->name, nth, loop->least);
}
