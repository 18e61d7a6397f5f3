/** Internal to impl/: values by the names that people write. */
#ifndef TD_BASE_NAMES_H
#define TD_BASE_NAMES_H

#include "base/status.h"

#include <stddef.h>

/** *out = the place of `name` among `count` names, of which the first is *first and the others follow
 * `stride` bytes apart: a list of names, or of structs that begin with one. `out` may point to an enum.
 * TD_BAD_ARGUMENT: out or name is NULL, or name is none of them: the message calls it `what` and lists
 * them. */
td_status td_names_find(const char *what, const char *const *first, size_t stride, int count,
                        const char *name, int *out);

#endif
