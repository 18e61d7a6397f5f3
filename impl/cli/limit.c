#include "cli/limit.h"

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/** The number in the file if it is less than `most`; else `most`, also if the file has no number ("max"). */
static double least_of(double most, const char *path)
{
    FILE *file = fopen(path, "re");
    double limit = most;

    if (!file)
        return most;
    if (fscanf(file, "%lf", &limit) != 1 || !(limit < most))
        limit = most;
    fclose(file);
    return limit;
}

/** The least of `most` and the limits of the group and its parents, up to the mounted root. A container may
 * see its own group as the root. */
static double least_upwards(double most, const char *root, const char *mount, char *group, const char *name)
{
    for (;;) {
        char path[PATH_MAX];
        char *const last = strrchr(group, '/');

        snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s/%s", root, mount, group, name);
        most = least_of(most, path);
        if (!last)
            return most;
        *last = '\0';
    }
}

/** Whether "memory" is among the names, which commas separate. */
static bool has_memory(const char *controllers)
{
    const size_t length = strlen("memory");

    for (const char *at = controllers; (at = strstr(at, "memory")); at += length)
        if ((at == controllers || at[-1] == ',') && (at[length] == '\0' || at[length] == ','))
            return true;
    return false;
}

double td_memory_limit(const char *root)
{
    double most = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGE_SIZE);
    char path[PATH_MAX], *line = NULL;
    size_t capacity = 0;

    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    while (file && getline(&line, &capacity, file) > 0) {
        /* <hierarchy>:<controllers>:<group>; version 2's has no controllers. */
        char *rest = line, *number = strsep(&rest, ":"), *controllers = strsep(&rest, ":");
        if (!rest)
            continue;
        rest[strcspn(rest, "\n")] = '\0';
        if (strcmp(number, "0") == 0 && *controllers == '\0')
            most = least_upwards(most, root, "", rest, "memory.max");
        else if (has_memory(controllers))
            most = least_upwards(most, root, "/memory", rest, "memory.limit_in_bytes");
    }
    if (file)
        fclose(file);
    free(line);
    return most;
}
