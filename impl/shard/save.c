/* Saves the weights and moments of all ranks in one file, and restores them. */
#include "base/check.h"
#include "base/safetensors_internal.h"
#include "comm/agree.h"
#include "shard/shard.h"
#include "train/saving.h"
#include "train/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/** The status of a rank, with its message. */
typedef struct ending {
    int32_t status;
    char message[252];
} ending;

/** Exchanges the ranks' statuses; `mine` is this rank's. Returns the status of the first rank that failed.
 * begins: ranks begin a call, so none may be late; else a rank may take long, as long as it is alive. */
static td_status exchange_status(td_comm *comm, td_status mine, bool begins)
{
    ending all[TD_COMM_MOST_RANKS], own = {.status = mine};
    td_status status = TD_OK;
    td_comm_info info;

    if (mine != TD_OK)
        snprintf(own.message, sizeof own.message, "%s", td_last_error());
    TD_TRY(td_comm_describe(comm, &info));
    TD_TRY((begins ? td_comm_exchange : td_comm_exchange_patiently)(comm, &own, sizeof own, all));
    for (int32_t rank = 0; rank < info.ranks && status == TD_OK; rank++)
        if (all[rank].status != TD_OK)
            status = td_fail((td_status)all[rank].status, "rank %d: %.*s", (int)rank,
                             (int)sizeof all->message, all[rank].message);
cleanup:
    return status;
}

static td_status agree(td_comm *comm, td_status mine)
{
    return exchange_status(comm, mine, false);
}

/* ---- the parts of each rank ---- */

/** A range that a rank updates. */
typedef struct claim {
    td_range range;
    int64_t rank;
} claim;

typedef struct claims {
    const td_saved *s;
    int64_t rank, most; /* this rank; claims of a rank, at most */
    claim *all;         /* [ranks][most]; a rank with fewer claims has empty ranges at the end */
} claims;

static td_status make_claim(void *user, int64_t index, void *row)
{
    const claims *c = user;
    const td_range range = index < c->s->count ? c->s->parts[index] : (td_range){0, 0};

    c->all[c->rank * c->most + index] = (claim){range, c->rank};
    memcpy(row, &range, sizeof range);
    return TD_OK;
}

static td_status look_at_claim(void *user, int64_t index, int32_t rank, const void *first, const void *row)
{
    const claims *c = user;

    c->all[index] = (claim){*(const td_range *)first, 0};
    c->all[rank * c->most + index] = (claim){*(const td_range *)row, rank};
    return TD_OK;
}

static int by_range(const void *a, const void *b)
{
    const claim *const x = a, *const y = b;
    const int64_t keys[][2] = {
        {x->range.begin, y->range.begin}, {x->range.end, y->range.end}, {x->rank, y->rank}};

    for (int i = 0; i < 3; i++)
        if (keys[i][0] != keys[i][1])
            return keys[i][0] < keys[i][1] ? -1 : 1;
    return 0;
}

/** Sets s->parts to the ranges that this rank writes. Each element is written by one rank: if several ranks
 * update a range, each writes a part of it. TD_UNSUPPORTED: an element that no rank updates. */
static td_status divide(td_saved *s, int64_t rank, int64_t elements, int64_t count, claim *all)
{
    int64_t covered = 0;

    s->count = 0;
    qsort(all, (size_t)count, sizeof *all, by_range);
    for (int64_t i = 0, next; i < count; i = next) {
        const td_range range = all[i].range;
        const int64_t begin = range.begin > covered ? range.begin : covered;

        for (next = i + 1;
             next < count && all[next].range.begin == range.begin && all[next].range.end == range.end;)
            next++;
        if (range.end <= covered)
            continue;
        if (range.begin > covered)
            break;
        for (int64_t k = i; k < next; k++)
            if (all[k].rank == rank)
                s->parts[s->count++] = (td_range){begin + (range.end - begin) * (k - i) / (next - i),
                                                  begin + (range.end - begin) * (k - i + 1) / (next - i)};
        covered = range.end;
    }
    return covered < elements ? td_fail(TD_UNSUPPORTED,
                                        "no rank updates the element %" PRId64
                                        ": td_transformer_save writes the weights alone",
                                        covered)
                              : TD_OK;
}

/** How many parts a rank has, and how many moments of a weight. */
typedef struct extent {
    int64_t count, moments;
} extent;

/** *most: the largest number of parts of a rank. s->moments: as ranks with groups have it. TD_UNSUPPORTED:
 * ranks with optimizers of two kinds. */
static td_status meet(td_comm *comm, int32_t ranks, td_saved *s, int64_t *most)
{
    const extent own = {s->count, s->moments};
    extent all[TD_COMM_MOST_RANKS];
    td_status status = TD_OK;

    *most = 0;
    TD_TRY(td_comm_exchange(comm, &own, sizeof own, all));
    for (int32_t rank = 0; rank < ranks; rank++) {
        *most = all[rank].count > *most ? all[rank].count : *most;
        s->moments = all[rank].moments > s->moments ? all[rank].moments : s->moments;
    }
    for (int32_t rank = 0; rank < ranks; rank++)
        TD_FAIL_IF(all[rank].moments >= 0 && all[rank].moments != s->moments, TD_UNSUPPORTED,
                   "rank %d has an optimizer with %" PRId64
                   " moments of a weight, another rank has one with %" PRId64,
                   (int)rank, all[rank].moments, s->moments);
cleanup:
    return status;
}

static td_status share_out(td_comm *comm, const td_comm_info *info, td_saved *s)
{
    td_setting settings[TD_TRAIN_SETTINGS] = {{0}};
    claims c = {.s = s, .rank = info->rank};
    td_status status = TD_OK;
    td_weights weights;

    TD_TRY(agree(comm, td_train_settings(s->train, settings)));
    TD_TRY(td_comm_agree(comm, TD_TRAIN_SETTINGS, settings));
    TD_TRY(td_transformer_weights(s->model, &weights));
    TD_TRY(meet(comm, info->ranks, s, &c.most));
    const int64_t count = info->ranks * c.most;
    c.all = calloc((size_t)count + 1, sizeof *c.all);
    TD_TRY(
        agree(comm, c.all ? TD_OK : td_fail(TD_NO_MEMORY, "no host memory for %" PRId64 " ranges", count)));
    TD_TRY(td_comm_compare(comm, &(td_rows){c.most, sizeof(td_range), make_claim, look_at_claim, &c}));
    TD_TRY(divide(s, info->rank, weights.elements, count, c.all));
cleanup:
    free(c.all);
    return status;
}

/* ---- saving ---- */

/** The open file of this rank. */
typedef struct target {
    int descriptor;
    const char *path;
    int64_t data; /* byte at which the tensors' data begins */
} target;

static td_status write_there(const void *to, int64_t at, const void *data, int64_t bytes)
{
    const target *p = to;

    return td_stored_write_at(p->descriptor, p->path, p->data + at, data, bytes);
}

/** Writes this rank's part, and waits for the disk. */
static td_status write_part(const td_saved *s, bool first, const target *p)
{
    const td_sink sink = {write_there, p};
    td_status status = TD_OK;

    TD_TRY(td_saved_write(s, first, &sink));
    TD_TRY(td_stored_sync(p->descriptor, p->path));
cleanup:
    return status;
}

static td_status begin_file(const td_saved *s, td_safetensors_writer **writer, td_stored_begun *begun,
                            int *descriptor)
{
    td_status status = TD_OK;

    TD_TRY(td_saved_create(s, writer));
    TD_TRY(td_safetensors_share(*writer, begun, descriptor));
cleanup:
    return status;
}

td_status td_shard_save(td_comm *comm, td_train *train, const char *path)
{
    td_stored_begun begun = {.inode = 0}, all[TD_COMM_MOST_RANKS];
    target p = {.descriptor = -1, .path = path};
    td_safetensors_writer *writer = NULL;
    td_saved s = {.buffer = NULL};
    td_comm_info info = {.rank = 0};
    td_status status = TD_OK;

    TD_TRY(td_comm_describe(comm, &info));
    const bool first = info.rank == 0;
    status = td_saved_open(train, path, &s);
    TD_TRY(exchange_status(comm, status == TD_OK ? td_saved_check_state(&s) : status, true));
    TD_TRY(share_out(comm, &info, &s));
    TD_TRY(agree(comm, td_train_settle(train)));
    TD_TRY(agree(comm, first ? begin_file(&s, &writer, &begun, &p.descriptor) : TD_OK));
    TD_TRY(td_comm_exchange(comm, &begun, sizeof begun, all));
    TD_TRY(agree(comm, first ? TD_OK : td_stored_join(path, &all[0], &p.descriptor)));
    p.data = all[0].data;
    TD_TRY(agree(comm, write_part(&s, first, &p)));
    TD_TRY(agree(comm, first ? td_safetensors_commit(writer) : TD_OK));
cleanup:
    if (info.rank > 0 && p.descriptor >= 0)
        close(p.descriptor);
    td_safetensors_writer_destroy(writer);
    td_saved_close(&s);
    return status;
}

/* ---- restoring ---- */

/** *hash = a hash of the begin of each tensor, which two files of different runs do not share. */
static td_status hash_file(const td_safetensors *file, uint64_t *hash)
{
    td_status status = TD_OK;
    char begin[1024];
    td_stored tensor;

    *hash = TD_HASH_BEGIN;
    for (int64_t i = 0; i < td_safetensors_count(file); i++) {
        TD_TRY(td_safetensors_tensor(file, i, &tensor));
        const int64_t bytes = tensor.bytes < (int64_t)sizeof begin ? tensor.bytes : (int64_t)sizeof begin;

        TD_TRY(td_safetensors_read(file, i, 0, bytes, begin));
        *hash = td_hash(*hash, begin, (size_t)bytes);
    }
cleanup:
    return status;
}

static td_status check_file(const td_saved *s, td_safetensors **file, int64_t *steps, uint64_t *hash)
{
    td_status status = TD_OK;

    TD_TRY(td_saved_check(s, file, steps));
    TD_TRY(hash_file(*file, hash));
cleanup:
    return status;
}

td_status td_shard_restore(td_comm *comm, td_train *train, const char *path)
{
    td_safetensors *file = NULL;
    td_saved s = {.buffer = NULL};
    td_status status = TD_OK;
    int64_t most, steps = 0;
    uint64_t hash = 0;
    td_comm_info info;

    TD_TRY(td_comm_describe(comm, &info));
    TD_TRY(exchange_status(comm, td_saved_open(train, path, &s), true));
    TD_TRY(meet(comm, info.ranks, &s, &most));
    TD_TRY(agree(comm, td_train_settle(train)));
    TD_TRY(agree(comm, check_file(&s, &file, &steps, &hash)));
    const td_setting is[] = {{"steps in the file", (double)steps},
                             {"a hash of the file's tensors", (double)(hash >> 12)}};
    TD_TRY(td_comm_agree(comm, 2, is));
    status = agree(comm, td_saved_read(&s, file, steps));
    td_saved_end(&s, status == TD_OK);
cleanup:
    td_safetensors_close(file);
    td_saved_close(&s);
    return status;
}
