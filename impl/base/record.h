/** One measured result, one JSON line. The keys are those of every tandem record; see README.md, "Records". */
#ifndef TD_BASE_RECORD_H
#define TD_BASE_RECORD_H

#include "base/stats.h"
#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_record td_record;

/** A record with "deliverable", "module", "impl", "status" ("ok" until set otherwise) and "time" (now, UTC, ISO
 * 8601). TD_BAD_ARGUMENT: a NULL or empty string. TD_NO_MEMORY. */
TD_API td_status td_record_create(const char *deliverable, const char *module, const char *impl,
                                  td_record **out);

/** Accepts NULL. */
TD_API void td_record_destroy(td_record *record);

/** Sets one key. `path` is a key or keys joined by dots: "case.batch" sets "batch" inside "case", which is made
 * where it is missing; an existing value is replaced. A non-finite number is stored as null, which JSON can hold.
 * TD_BAD_ARGUMENT: a NULL, an empty path, a part of one that is empty or beyond 63 bytes, a path that runs through a
 * value that is no object, a count below 0 or beyond 2^31 - 1.
 * TD_NO_MEMORY. The record is unchanged after either. */
TD_API td_status td_record_set_string(td_record *record, const char *path, const char *value);
TD_API td_status td_record_set_number(td_record *record, const char *path, double value);
TD_API td_status td_record_set_integer(td_record *record, const char *path, int64_t value);
TD_API td_status td_record_set_bool(td_record *record, const char *path, bool value);

/** Sets path to {"median", "mean", "std", "min", "max", "p95", "n"}: "ms" is the path for a time. */
TD_API td_status td_record_set_stats(td_record *record, const char *path, const td_stats *stats);

/** Sets path to an array of numbers, "samples" for the raw times of a measurement. */
TD_API td_status td_record_set_samples(td_record *record, const char *path, const double *samples,
                                       int64_t count);

/** The record as one line of JSON without a newline. *out belongs to the caller; give it to td_record_text_free. */
TD_API td_status td_record_text(const td_record *record, char **out);
TD_API void td_record_text_free(char *text);

/** Appends the record to `path` as one line, made where it is missing, and returns when the kernel has it all.
 *
 * If the file does not end in a newline (its writer was killed inside a line) a newline is written first, so the
 * torn line stays alone and nothing is lost. TD_IO_ERROR, naming the path and the reason: it cannot be opened or
 * written, or the disk is full; earlier lines are intact, and a torn last line is cut off again where the system
 * lets us. */
TD_API td_status td_record_append(const td_record *record, const char *path);

TD_END_DECLS

#endif
