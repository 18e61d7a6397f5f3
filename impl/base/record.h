/** One measured result, one JSON line. Every tandem record has the same keys; see docs/parity.md,
 * "Records". */
#ifndef TD_BASE_RECORD_H
#define TD_BASE_RECORD_H

#include "base/stats.h"
#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_record td_record;

/** A record with "deliverable", "module", "impl", "status" ("ok" until set otherwise) and "time" (now, UTC,
 * ISO 8601). TD_BAD_ARGUMENT: a string that is NULL, empty or not UTF-8. TD_NO_MEMORY. */
TD_API td_status td_record_create(const char *deliverable, const char *module, const char *impl,
                                  td_record **out);

/** Accepts NULL. */
TD_API void td_record_destroy(td_record *record);

/** Sets one key. `path` is a key or keys joined by dots: "case.batch" sets "batch" inside "case", which is
 * made where it is missing; an existing value is replaced. A non-finite number is stored as null, which JSON
 * can hold. TD_BAD_ARGUMENT: a NULL, an empty path, more than 8 parts, a part that is empty or beyond 63
 * bytes, a path that runs through a value that is no object, a path or string that is not UTF-8, a count
 * below 0 or beyond 2^31 - 1. TD_NO_MEMORY. The record is unchanged after either. */
TD_API td_status td_record_set_string(td_record *record, const char *path, const char *value);
TD_API td_status td_record_set_number(td_record *record, const char *path, double value);
TD_API td_status td_record_set_integer(td_record *record, const char *path, int64_t value);
TD_API td_status td_record_set_bool(td_record *record, const char *path, bool value);

/** Sets path to {"median", "mean", "std", "min", "max", "p95", "n"}: "ms" is the path for a time. */
TD_API td_status td_record_set_stats(td_record *record, const char *path, const td_stats *stats);

/** Sets path to an array of numbers, "samples" for the raw times of a measurement. */
TD_API td_status td_record_set_samples(td_record *record, const char *path, const double *samples,
                                       int64_t count);

/** The record as one line of JSON without a newline. *out belongs to the caller; give it to
 * td_record_text_free. */
TD_API td_status td_record_text(const td_record *record, char **out);
TD_API void td_record_text_free(char *text);

/** Appends the record to `path` as one line, made where it is missing, and returns when the kernel has it
 * all.
 *
 * If the file does not end in a newline (its writer was killed inside a line) a newline is written first, so
 * the torn line stays alone and nothing is lost. Writers take turns by flock(). A writer waits for a
 * lock for up to 5 s, whatever signals come. On a file system without locks, lines of several writers may
 * mix.
 *
 * TD_IO_ERROR, naming the path and the reason: it is no regular file, cannot be opened or written, is kept
 * locked by another program, or the disk is full. Earlier lines are intact, and a torn last line is cut off
 * again, except on a file system without locks. A process that may reach RLIMIT_FSIZE must ignore SIGXFSZ, or
 * it dies inside the line. */
TD_API td_status td_record_append(const td_record *record, const char *path);

/** Whether td_record_append could write to `path` now: creates the file if it is missing, takes the lock and
 * gives it back. For a program that measures first. TD_BAD_ARGUMENT: NULL or empty. TD_IO_ERROR as above. */
TD_API td_status td_record_probe(const char *path);

TD_END_DECLS

#endif
