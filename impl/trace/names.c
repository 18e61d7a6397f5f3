#include "trace/names.h"

#include "base/setting.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST = 256 };

void td_names_deinit(td_names *names)
{
    for (size_t i = 0; i < names->capacity; i++)
        free(names->slots[i]);
    free(names->slots);
    *names = (td_names){.slots = NULL};
}

/** The slot with the text, or the free slot for it. */
static char **slot_of(char **slots, size_t capacity, const char *text)
{
    const uint64_t hash = td_hash(TD_HASH_BEGIN, text, strlen(text));
    size_t at = (hash ^ (hash >> 32)) & (capacity - 1);

    while (slots[at] && strcmp(slots[at], text) != 0)
        at = (at + 1) & (capacity - 1);
    return &slots[at];
}

static bool reserve(td_names *names)
{
    if (2 * (names->count + 1) <= names->capacity)
        return true;

    const size_t capacity = names->capacity > 0 ? 2 * names->capacity : FIRST;
    char **slots = calloc(capacity, sizeof *slots);
    if (!slots)
        return false;
    for (size_t i = 0; i < names->capacity; i++)
        if (names->slots[i])
            *slot_of(slots, capacity, names->slots[i]) = names->slots[i];
    free(names->slots);
    names->slots = slots;
    names->capacity = capacity;
    return true;
}

const char *td_names_keep(td_names *names, const char *text)
{
    if (!reserve(names))
        return NULL;
    char **slot = slot_of(names->slots, names->capacity, text);
    if (!*slot) {
        const size_t bytes = strlen(text) + 1;

        *slot = calloc(bytes, 1);
        if (!*slot)
            return NULL;
        memcpy(*slot, text, bytes);
        names->count++;
    }
    return *slot;
}
