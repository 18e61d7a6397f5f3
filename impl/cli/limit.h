/** The amount of memory that this process may use. */
#ifndef TD_CLI_LIMIT_H
#define TD_CLI_LIMIT_H

/** Returns bytes: the least of the machine's memory and the limits of the process's control groups, version 1
 * or 2. They are read under <root>/proc/self/cgroup and <root>/sys/fs/cgroup. root is "", except in tests. */
double td_memory_limit(const char *root);

#endif
