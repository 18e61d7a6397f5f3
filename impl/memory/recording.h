/** Internal to impl/memory/: a recording, and the text that its files are made of. */
#ifndef TD_MEMORY_RECORDING_H
#define TD_MEMORY_RECORDING_H

#include "base/file.h"
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

/* ---- files ---- */

/** A file beside its place, written in pieces: td_memory_file_put fills a buffer and forgets about failures,
 * of which td_memory_file_end knows. */
typedef struct td_memory_file {
    td_beside file;
    td_status status; /* of the first write that failed */
    size_t used;
    char buffer[1 << 14];
} td_memory_file;

/** *out belongs to the caller. Errors: td_beside_open's; TD_BAD_ARGUMENT: path is NULL or empty. */
td_status td_memory_file_begin(const char *path, td_memory_file **out);
void td_memory_file_put(td_memory_file *file, const void *data, size_t bytes);
void td_memory_file_print(td_memory_file *file, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/** Writes what is left and renames, unless `status` or a write failed; frees. Returns the first failure. file
 * may be NULL. */
td_status td_memory_file_end(td_memory_file *file, td_status status);

#endif
