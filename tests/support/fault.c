#include "support/fault.h"

#include <stddef.h>

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
