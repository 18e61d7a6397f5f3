/** How much memory the system leaves to this process. */
#ifndef TD_CLI_LIMIT_H
#define TD_CLI_LIMIT_H

/** Bytes: the machine's memory, or less where a control group that the process is in has a lower limit
 * (version 1 or 2, as the kernel shows them under <root>/proc/self/cgroup and <root>/sys/fs/cgroup). root is
 * "" but in a test. */
double td_memory_limit(const char *root);

#endif
