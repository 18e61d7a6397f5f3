#include "memory/recording.h"

#include "base/check.h"

static void put_pair(td_writer *file, int64_t pair)
{
    if (pair < 0)
        td_writer_print(file, "null");
    else
        td_writer_print(file, "%" PRId64, pair);
}

static void put_entry(td_writer *file, const td_memory_recording *recording, int64_t i)
{
    static const char *const actions[] = {[TD_MEMORY_ALLOC] = "alloc",
                                          [TD_MEMORY_FREE] = "free",
                                          [TD_MEMORY_LIVE] = "live",
                                          [TD_MEMORY_DEAD] = "dead",
                                          [TD_MEMORY_OOM] = "oom"};
    const td_memory_entry *entry = &recording->entries[i];
    const td_memory_event *event = &entry->event;

    td_writer_print(
        file, "%s\n{\"action\":\"%s\",\"address\":%" PRIuPTR ",\"bytes\":%zu,\"time_ns\":%" PRId64,
        i > 0 ? "," : "", actions[event->action], (uintptr_t)event->address, event->bytes, event->time_ns);
    td_writer_print(file, ",\"label\":");
    td_writer_json(file, event->label);
    td_writer_print(file, ",\"category\":\"%s\",\"phase\":\"%s\",\"pair\":",
                    td_memory_category_name(entry->category), td_memory_phase_name(entry->phase));
    put_pair(file, entry->pair);
    td_writer_print(file, ",\"allocated_bytes\":%zu,\"live_bytes\":%zu}",
                    event->current_bytes - recording->summary.base_bytes, entry->live_bytes);
}

static void put_all(td_writer *file, const td_memory_recording *recording)
{
    const td_memory_summary *summary = &recording->summary;
    bool first = true;

    td_writer_print(file,
                    "{\"device\":\"%s\",\"pass\":\"%s\",\"base_bytes\":%zu,\"peak_bytes\":%zu,"
                    "\"live_peak_bytes\":%zu,\"phases\":[",
                    recording->device, td_memory_pass_name(recording->pass), summary->base_bytes,
                    summary->peak_bytes, summary->whole.live_bytes);
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        const td_memory_span *span = &summary->phases[phase];

        if (span->end_ns == 0)
            continue;
        td_writer_print(file,
                        "%s\n{\"name\":\"%s\",\"first\":%" PRId64 ",\"end\":%" PRId64 ",\"begin_ns\":%" PRId64
                        ",\"end_ns\":%" PRId64 "}",
                        first ? "" : ",", td_memory_phase_name((td_memory_phase)phase), span->first,
                        span->end, span->begin_ns, span->end_ns);
        first = false;
    }
    td_writer_print(file, "],\"events\":[");
    for (int64_t i = 0; i < recording->count; i++)
        put_entry(file, recording, i);
    td_writer_print(file, "]}\n");
}

td_status td_memory_write_events(const td_memory_recording *recording, const char *path)
{
    td_writer *file = NULL;
    td_status status = TD_OK;

    TD_CHECK(recording, "recording is NULL");
    TD_TRY(td_writer_begin(path, &file));
    put_all(file, recording);
cleanup:
    return td_writer_end(file, status);
}
