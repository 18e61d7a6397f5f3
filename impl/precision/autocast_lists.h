/** Internal to precision/: the operator lists of torch.autocast. */
#ifndef TD_PRECISION_AUTOCAST_LISTS_H
#define TD_PRECISION_AUTOCAST_LISTS_H

#include "precision/precision.h"

enum { TD_AUTOCAST_LISTS = 4 };

typedef struct td_autocast_list {
    td_autocast_rule rule;
    int64_t count;
    const char *const *names;
} td_autocast_list;

/** Indexed by td_autocast_device. A name is in at most one list of a device. */
extern const td_autocast_list td_autocast_lists[2][TD_AUTOCAST_LISTS];

#endif
