#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

bool td_grow(void *array, int64_t count, int64_t *room, int64_t first, size_t size)
{
    const int64_t more = *room > 0 ? 2 * *room : first;
    void *old, *grown;

    if (count < *room)
        return true;
    memcpy(&old, array, sizeof old);
    grown = realloc(old, (size_t)more * size);
    if (!grown)
        return false;
    memcpy(array, &grown, sizeof grown);
    *room = more;
    /* cppcheck-suppress memleak ; the caller's pointer owns it */
    return true;
}
