#include "support/fault.h"
#include "support/test.h"

#include <execinfo.h>
#include <inttypes.h>

static int64_t calls, fails_at;
static const char *failed;

void td_fault_at(int64_t nth)
{
    calls = 0;
    fails_at = nth;
    failed = NULL;
}

/* The calls of a run without a fault: the first and the last of every stack of callers. Stacks stay in the
 * table for later loops of the program. */
enum { MOST_CALLS = 1 << 14, MOST_STACKS = 1 << 16, MOST_FRAMES = 64 };

static bool noting;
static struct {
    int64_t calls, count;
    struct {
        uint64_t hash;       /* 0: no stack */
        bool known;          /* its first call has failed in an earlier loop */
        int64_t first, last; /* 0: the run has no such call */
    } stacks[MOST_STACKS];
    bool fails[MOST_CALLS];
} noted;

static void note_call(void)
{
    void *frames[MOST_FRAMES];
    const int depth = backtrace(frames, MOST_FRAMES);
    uint64_t hash = 1;

    if (++noted.calls >= MOST_CALLS || noted.count >= MOST_STACKS / 2)
        return;
    for (int i = 0; i < depth; i++)
        hash = (hash ^ (uint64_t)(uintptr_t)frames[i]) * UINT64_C(0x9e3779b97f4a7c15);
    size_t at = hash >> 48;
    while (noted.stacks[at].hash && noted.stacks[at].hash != hash)
        at = (at + 1) % MOST_STACKS;
    if (!noted.stacks[at].hash)
        noted.count++;
    if (!noted.stacks[at].first)
        noted.stacks[at].first = noted.calls;
    noted.stacks[at].hash = hash;
    noted.stacks[at].last = noted.calls;
}

bool td_fault(const char *name)
{
    if (noting)
        note_call();
    if (++calls != fails_at)
        return false;
    failed = name;
    return true;
}

const char *td_fault_name(void)
{
    return failed;
}

/* A double has the name of the library's function. */
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

/* Runs once, with the nth call failing; 0: no call fails. */
static void run_once(const td_fault_loop *loop, void *state, int64_t nth)
{
    if (loop->prepare)
        loop->prepare(state);
    td_fault_at(nth);
    const td_status status = loop->run(state);
    const char *const name = td_fault_name();
    td_fault_at(0);
    if (!expects(loop, name, status))
        fail_msg("%s: call %" PRId64 ", %s, failed, and it returned %d: %s", loop->name, nth,
                 name ? name : "none", (int)status, td_last_error());
    if (loop->check)
        loop->check(state, status, name);
}

void td_fault_each(const td_fault_loop *loop, void *state)
{
    const bool every = getenv("TANDEM_FUZZ_SECONDS") != NULL;

    run_once(loop, state, 0); /* now all code that runs once in a process has run */
    noted.calls = 0;
    memset(noted.fails, 0, sizeof noted.fails);
    noting = true;
    run_once(loop, state, 0);
    noting = false;
    if (noted.calls < loop->least || noted.calls >= MOST_CALLS)
        fail_msg("%s: %" PRId64 " calls, needs %" PRId64 " to %d", loop->name, noted.calls, loop->least,
                 MOST_CALLS - 1);
    if (noted.count >= MOST_STACKS / 2)
        fail_msg("%s: more than %d stacks of callers", loop->name, MOST_STACKS / 2);
    for (int64_t i = 0; i < MOST_STACKS; i++) {
        noted.fails[noted.stacks[i].last] = true;
        if (!noted.stacks[i].known)
            noted.fails[noted.stacks[i].first] = true;
        noted.stacks[i].known |= noted.stacks[i].first > 0;
        noted.stacks[i].first = noted.stacks[i].last = 0;
    }
    for (int64_t nth = 1; nth <= noted.calls; nth++)
        if (every || noted.fails[nth])
            run_once(loop, state, nth);
    run_once(loop, state, 0);
}
