/** Internal to impl/: arrays that grow. */
#ifndef TD_BASE_GROW_H
#define TD_BASE_GROW_H

#include "base/status.h"

/** Makes room for element number `count` of an array of `*room` elements of `size` bytes. `array` points to
 * the pointer of the array. A full array gets twice the room, an empty one `first` elements. false: no
 * memory, and the array is unchanged. */
bool td_grow(void *array, int64_t count, int64_t *room, int64_t first, size_t size);

#endif
