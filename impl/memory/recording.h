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
    int64_t epoch_ns; /* added to an event's time: since 1970 */
    td_memory_entry *entries;
    int64_t count;
    char *texts;         /* the labels, one behind the other */
    const char **labels; /* where each of them begins, ascending */
    int64_t label_count;
    td_memory_summary summary;
};

/** The number of an entry's label. */
int64_t td_memory_label_index(const td_memory_recording *recording, const td_memory_entry *entry);

/** The last part of a path of labels. */
const char *td_memory_last_part(const char *label);

/** Of a tensor's name, "layers.12.attn.q": the layer and, in *rest, "attn.q"; -1 and the whole name where it
 * is no layer's. */
int64_t td_memory_layer_of(const char *name, const char **rest);

/** Matches beginnings and ends, adds up what is alive, and fills the summary but for what the device and the
 * plan say. Needs entries with their categories and phases, and the ends of phases. TD_NO_MEMORY. */
td_status td_memory_replay(td_memory_recording *recording);

#endif
