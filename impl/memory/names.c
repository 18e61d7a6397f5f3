#include "memory/recording.h"

#include "base/check.h"
#include "base/names.h"

#include <stdlib.h>
#include <string.h>

static const char *const passes[] = {
    [TD_MEMORY_INFERENCE] = "inference", [TD_MEMORY_FORWARD] = "forward", [TD_MEMORY_STEP] = "step"};
static const char *const categories[TD_MEMORY_CATEGORIES] = {[TD_MEMORY_WEIGHTS] = "weights",
                                                             [TD_MEMORY_GRADIENTS] = "gradients",
                                                             [TD_MEMORY_OPTIMIZER_STATE] = "optimizer state",
                                                             [TD_MEMORY_ACTIVATIONS] = "activations",
                                                             [TD_MEMORY_SCRATCH] = "scratch"};
static const char *const phases[TD_MEMORY_PHASES] = {[TD_MEMORY_IN_CREATE] = "create",
                                                     [TD_MEMORY_IN_FORWARD] = "forward",
                                                     [TD_MEMORY_IN_BACKWARD] = "backward",
                                                     [TD_MEMORY_IN_OPTIMIZER] = "optimizer"};

enum { PASSES = sizeof passes / sizeof *passes };

const char *td_memory_pass_name(td_memory_pass pass)
{
    return (unsigned)pass < PASSES ? passes[pass] : NULL;
}

const char *td_memory_category_name(td_memory_category category)
{
    return (unsigned)category < TD_MEMORY_CATEGORIES ? categories[category] : NULL;
}

const char *td_memory_phase_name(td_memory_phase phase)
{
    return (unsigned)phase < TD_MEMORY_PHASES ? phases[phase] : NULL;
}

td_status td_memory_pass_parse(const char *name, td_memory_pass *out)
{
    return td_names_find("name", passes, sizeof *passes, PASSES, name, (int *)out);
}

const char *td_memory_last_part(const char *label)
{
    const char *slash = strrchr(label, '/');

    return slash ? slash + 1 : label;
}

int64_t td_memory_layer_of(const char *name, const char **rest)
{
    const size_t prefix = strlen("layers.");
    char *end;

    *rest = name;
    if (strncmp(name, "layers.", prefix) != 0)
        return -1;
    const long long layer = strtoll(name + prefix, &end, 10);
    if (*end != '.')
        return -1;
    *rest = end + 1;
    return layer;
}
