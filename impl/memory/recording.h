/** Internal to impl/memory/: a recording. */
#ifndef TD_MEMORY_RECORDING_H
#define TD_MEMORY_RECORDING_H

#include "base/writer.h"
#include "memory/memory.h"

struct td_memory_recording {
    td_memory_pass pass;
    char device[24]; /* td_device_name() */
    int index;       /* of the GPU; 0 for a CPU */
    int64_t layers;
    int64_t epoch_ns; /* an event's time + epoch_ns = ns since 1970 */
    td_memory_entry *entries;
    int64_t count;
    char *texts;         /* the labels, one after the other */
    const char **labels; /* [label_count], the begin of each label, in ascending order */
    int64_t label_count;
    td_memory_summary summary;
};

/** The index in `labels` of an entry's label. */
int64_t td_memory_label_index(const td_memory_recording *recording, const td_memory_entry *entry);

/** The last part of a path of labels. */
const char *td_memory_last_part(const char *label);

/** From the tensor's name "layers.12.attn.q": returns 12, *rest = "attn.q". From a name without a layer:
 * returns -1, *rest = name. */
int64_t td_memory_layer_of(const char *name, const char **rest);

/** Whether the address is that of a byte of the block; not for NULL. */
bool td_memory_contains(const td_memory_event *block, const void *address);

/** Entries of tensors in a freed block come after this index: that of the block's ALLOC, or 0. */
static inline int64_t td_memory_first_inside(const td_memory_entry *freed)
{
    return freed->pair > 0 ? freed->pair : 0;
}

/** Pairs the begin and the end of each block and tensor, adds up live bytes, and fills the summary except
 * base_bytes, peak_bytes and allocated. Needs each entry's event, category and phase, and each phase's
 * entries and times. TD_NO_MEMORY. */
td_status td_memory_replay(td_memory_recording *recording);

#endif
