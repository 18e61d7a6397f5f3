#include "base/grow.h"

#include <stdlib.h>
#include <string.h>

bool td_grow(void *array, int64_t count, int64_t *room, int64_t first, size_t size)
{
    const int64_t more = *room > 0 ? 2 * *room : first;
    void *block;

    if (count < *room)
        return true;
    memcpy(&block, array, sizeof block);
    block = realloc(block, (size_t)more * size);
    if (!block)
        return false;
    memcpy(array, &block, sizeof block);
    *room = more;
    return true;
}
