/** Internal to impl/: looks up names that users write. */
#ifndef TD_BASE_NAMES_H
#define TD_BASE_NAMES_H

#include "base/status.h"

#include <stddef.h>

/** *out = the index of `name` in a list of `count` names. `first` points to the first name; the others follow
 * at a distance of `stride` bytes. So the list may be an array of names or of structs whose first member is
 * a name. `out` may point to an enum. TD_BAD_ARGUMENT: out or name is NULL, or the list lacks the name. The
 * message calls the argument `what` and lists the allowed names. */
td_status td_names_find(const char *what, const char *const *first, size_t stride, int count,
                        const char *name, int *out);

#endif
