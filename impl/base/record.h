/** One measured result, one JSON line. Every tandem record has the same keys; see docs/parity.md,
 * "Records". */
#ifndef TD_BASE_RECORD_H
#define TD_BASE_RECORD_H

#include "base/stats.h"
#include "base/status.h"

TD_BEGIN_DECLS

typedef struct td_record td_record;

/** Creates a record with "deliverable", "module", "impl", "status" ("ok" until set otherwise) and "time"
 * (now, UTC, ISO 8601). *out belongs to the caller; free it with td_record_destroy. TD_BAD_ARGUMENT: out is
 * NULL, or a string is NULL, empty or not UTF-8. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_record_create(const char *deliverable, const char *module, const char *impl,
                                  td_record **out);

/** Accepts NULL. */
TD_API void td_record_destroy(td_record *record);

/** Sets one key. `path` is a key, or keys joined by dots: "case.batch" sets "batch" in the object "case",
 * which is created if it is missing. An existing value is replaced. A number that is not finite is stored as
 * null, since JSON has no NaN.
 *
 * TD_BAD_ARGUMENT: a NULL; a path that is empty, has more than 8 parts, or has a part that is empty or longer
 * than 63 bytes; a path through a value that is not an object; a path or string that is not UTF-8; a count
 * below 0 or beyond 2^31 - 1. TD_NO_MEMORY. The record is then unchanged. */
TD_API td_status td_record_set_string(td_record *record, const char *path, const char *value);
TD_API td_status td_record_set_number(td_record *record, const char *path, double value);
TD_API td_status td_record_set_integer(td_record *record, const char *path, int64_t value);
TD_API td_status td_record_set_bool(td_record *record, const char *path, bool value);

/** Sets path to an object {"median", "mean", "std", "min", "max", "p95", "n"}. Use the path "ms" for times in
 * milliseconds. */
TD_API td_status td_record_set_stats(td_record *record, const char *path, const td_stats *stats);

/** Sets path to an array of numbers. Use the path "samples" for the raw times of a measurement. */
TD_API td_status td_record_set_samples(td_record *record, const char *path, const double *samples,
                                       int64_t count);

/** *out = the record as one line of JSON without a newline; free it with td_record_text_free.
 * TD_BAD_ARGUMENT: a NULL. TD_NO_MEMORY. *out is then NULL. */
TD_API td_status td_record_text(const td_record *record, char **out);
TD_API void td_record_text_free(char *text);

/** Appends the record as one line to the file `path`, which is created if it is missing. When the call
 * returns, the kernel has the whole line.
 *
 * If a writer was killed in the middle of a line, the file does not end in a newline. A newline is then
 * written first, so that only the torn line is invalid. Writers lock the file with flock() and wait up to 5 s
 * for the lock; signals do not shorten the wait. On a file system without locks, lines of several writers may
 * mix.
 *
 * TD_BAD_ARGUMENT: record is NULL, path is NULL or empty. TD_IO_ERROR, naming the path and the reason: the
 * file is not a regular file, cannot be opened or written, or stays locked by another program, or the disk is
 * full. Earlier lines are then intact, and a part of the new line is cut off again (except on a file system
 * without locks). If the process may reach RLIMIT_FSIZE, it must ignore SIGXFSZ; otherwise the signal kills
 * it in the middle of the line. */
TD_API td_status td_record_append(const td_record *record, const char *path);

/** Checks that td_record_append could write to `path` now: creates the file if it is missing, takes the lock
 * and releases it. Call it before a long measurement. TD_BAD_ARGUMENT: path is NULL or empty. TD_IO_ERROR:
 * as for td_record_append. */
TD_API td_status td_record_probe(const char *path);

TD_END_DECLS

#endif
