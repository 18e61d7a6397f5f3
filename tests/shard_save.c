/* Files that ranks write and read together: test_shard_save gloo RANKS starts the ranks itself. With 2 ranks
 * it runs all tests. With more ranks it runs the tests of several numbers of ranks. With "killed RANK" after
 * that, the rank is killed while it writes. */
#include "support/draw.h"
#include "support/file_kit.h"
#include "support/shard_kit.h"
#include "transformer/saving.h"

#include <errno.h>
#include <glob.h>
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STEPS = 2 };

static const char path[] = "shard-save.safetensors", other_path[] = "shard-save-other.safetensors";

static td_comm *all_ranks;
static td_comm_info all_info;

/* ---- system calls that fail ---- */

static enum { NONE, WRITE, SYNC, RENAME, TRUNCATE, KILL, SLOW } fails;
static int reads_left = -1; /* reads until one fails; below 0: none fails */
static bool interrupted;    /* the last write was interrupted */

ssize_t __real_pwrite(int file, const void *data, size_t bytes, off_t at);
ssize_t __wrap_pwrite(int file, const void *data, size_t bytes, off_t at)
{
    if (fails == KILL)
        raise(SIGKILL);
    if (fails == WRITE || !interrupted) {
        errno = fails == WRITE ? ENOSPC : EINTR;
        interrupted = true;
        return -1;
    }
    return __real_pwrite(file, data, bytes > 64 ? bytes / 2 : bytes, at); /* a partial write */
}

#define FAULT(when, type, name, parameters, arguments)                                                       \
    type __real_##name parameters;                                                                           \
    type __wrap_##name parameters;                                                                           \
    type __wrap_##name parameters                                                                            \
    {                                                                                                        \
        errno = EIO;                                                                                         \
        return fails == (when) ? -1 : __real_##name arguments;                                               \
    }

FAULT(SYNC, int, fsync, (int file), (fails == SLOW ? (sleep(2), file) : file))
FAULT(TRUNCATE, int, ftruncate, (int file, off_t length), (file, length))
FAULT(RENAME, int, renameat, (int from, const char *a, int to, const char *b), (from, a, to, b))

ssize_t __real_pread(int file, void *to, size_t bytes, off_t at);
ssize_t __wrap_pread(int file, void *to, size_t bytes, off_t at)
{
    errno = EIO;
    return reads_left >= 0 && reads_left-- == 0 ? -1 : __real_pread(file, to, bytes, at);
}

/* Whether an unfinished file is left. */
static bool is_left(void)
{
    glob_t found;
    const bool is = glob("shard-save*.partial", 0, NULL, &found) == 0;

    globfree(&found);
    return is;
}

/* ---- communicators of some ranks ---- */

/* Whether this rank is one of the first `ranks`. Opens a communicator of these ranks for the kit. */
static bool join_within(int32_t ranks, double seconds)
{
    static int number;
    td_comm_options options = td_ranks_options(TD_COMM_GLOO);
    char run[64];

    snprintf(run, sizeof run, "%.24s-save-%d", options.run ? options.run : "run", number++);
    options.run = run;
    options.ranks = ranks;
    options.local_ranks = ranks;
    options.seconds = seconds;
    if (all_info.rank >= ranks)
        return false;
    td_assert_ok(td_comm_open(shard_dev, &options, &shard_comm));
    td_assert_ok(td_comm_describe(shard_comm, &shard_info));
    return true;
}

static bool join(int32_t ranks)
{
    return join_within(ranks, td_ranks_options(TD_COMM_GLOO).seconds);
}

static void leave(bool joined)
{
    if (joined)
        td_assert_ok(td_comm_close(shard_comm));
    shard_comm = all_ranks;
    shard_info = all_info;
    td_assert_ok(td_comm_barrier(all_ranks));
}

/* ---- trainers ---- */

/* Kinds of splits: none (every rank has all state); whole tensors; parts of buckets; parts of units. */
static const shard_setting settings[] = {
    {.name = "whole", .kind = TD_SHARD_TENSORS, .adamw = true},
    {.name = "tensors", .kind = TD_SHARD_TENSORS, .adamw = true, .precision = TD_PRECISION_BF16_MIXED},
    {.name = "flat", .kind = TD_SHARD_FLAT, .bucket_mb = 0.008, .adamw = true, .two_groups = true},
    {.name = "flat, weights of 2 bytes",
     .kind = TD_SHARD_FLAT,
     .bucket_mb = 0.008,
     .adamw = true,
     .precision = TD_PRECISION_BF16,
     .two_groups = true},
    {.name = "flat in 16 bits",
     .kind = TD_SHARD_FLAT,
     .bucket_mb = 0.01,
     .adamw = true,
     .precision = TD_PRECISION_BF16_MIXED,
     .time = TD_UPDATE_ALONG},
    {.name = "full in 16 bits",
     .kind = TD_SHARD_FULL,
     .adamw = true,
     .precision = TD_PRECISION_BF16_MIXED,
     .two_groups = true}};

enum { SETTINGS = sizeof settings / sizeof *settings };

static shard_trainer open_trainer(int i)
{
    const shard_trainer t = shard_open_trainer(&settings[i], i > 0);

    td_assert_ok(td_train_set_metadata(t.train, 1, &(td_stored_text){"position", "17"}));
    return t;
}

/* The file must equal the file of the trainer's state. All ranks compare. */
static void assert_file_is(const char *bytes, size_t count, shard_trainer *t)
{
    td_assert_ok(td_shard_save(shard_comm, t->train, other_path));
    assert_true(file_is(other_path, bytes, count));
    td_assert_ok(td_comm_barrier(shard_comm)); /* all have read it */
}

/* Steps on batches that are equal on all ranks, so that any number of ranks makes the same step. */
static void step_alike(shard_trainer *t, int number)
{
    int64_t *ids = shard_tokens_of("alike", number, 0, 1);

    td_assert_ok(td_train_step(t->train, ids, ids, SHARD_BATCH, SHARD_CONTEXT));
    td_assert_ok(td_device_free(shard_dev, ids));
}

/* ---- tests ---- */

TD_BODY(ranks_go_on_from_a_file_with_the_same_bits)
{
    for (int i = 0; i < SETTINGS; i++) {
        shard_trainer uncut = open_trainer(i), cut = open_trainer(i), resumed;
        size_t bytes;

        for (int number = 0; number < STEPS; number++) {
            shard_step(&uncut, number);
            shard_step(&cut, number);
        }
        td_assert_ok(td_shard_save(shard_comm, cut.train, path));
        shard_close_trainer(&cut);
        resumed = open_trainer(i);
        shard_step(&resumed, 17); /* gives it moments, which restore replaces */
        td_assert_ok(td_shard_restore(shard_comm, resumed.train, path));
        for (int number = STEPS; number < 2 * STEPS; number++) {
            shard_step(&uncut, number);
            shard_step(&resumed, number);
        }
        td_assert_ok(td_shard_save(shard_comm, uncut.train, path));
        char *file = file_read(path, &bytes);
        assert_file_is(file, bytes, &resumed);
        free(file);
        shard_close_trainer(&uncut);
        shard_close_trainer(&resumed);
    }
}

/* A file of `from` ranks at `to` ranks: the same numbers, and the same steps up to rounding. */
static void check_numbers_of_ranks(int i, int32_t from, int32_t to)
{
    bool joined = join(from);
    size_t bytes;
    char *file;

    if (joined) {
        shard_trainer t = open_trainer(i);

        step_alike(&t, 0);
        td_assert_ok(td_shard_save(shard_comm, t.train, path));
        step_alike(&t, 1);
        td_assert_ok(td_shard_save(shard_comm, t.train, "shard-save-next.safetensors"));
        shard_close_trainer(&t);
    }
    leave(joined);
    joined = join(to);
    if (joined) {
        shard_trainer t = open_trainer(i), next = open_trainer(i);

        file = file_read(path, &bytes);
        td_assert_ok(td_shard_restore(shard_comm, t.train, path));
        assert_file_is(file, bytes, &t);
        free(file);
        td_assert_ok(td_shard_restore(shard_comm, next.train, "shard-save-next.safetensors"));
        step_alike(&t, 1);
        td_assert_ok(td_train_settle(t.train));
        const td_weights w = shard_weights_of(t.train);
        void *numbers = shard_numbers_of(&t), *wanted = shard_numbers_of(&next);
        double *truth = td_as_f64(w.dtype, wanted, w.elements);
        td_assert_close(settings[i].name, w.dtype, numbers, truth, w.elements,
                        settings[i].precision == TD_PRECISION_F32 ? 1e-5 : 2e-2);
        free(truth);
        free(wanted);
        free(numbers);
        if (to == 1 && i == 0) { /* one process reads it too, and writes the same file */
            td_assert_ok(td_train_restore(t.train, path));
            td_assert_ok(td_train_save(t.train, other_path));
            td_assert_ok(td_train_save(t.train, other_path)); /* the second file has the metadata, too */
            file = file_read(path, &bytes);
            assert_true(file_is(other_path, file, bytes));
            free(file);
        }
        shard_close_trainer(&t);
        shard_close_trainer(&next);
    }
    leave(joined);
}

TD_BODY(any_number_of_ranks_reads_a_file)
{
    if (all_info.ranks == 2) {
        for (int i = 0; i < SETTINGS; i++)
            check_numbers_of_ranks(i, 2, 1);
        return;
    }
    for (int i = 1; i < SETTINGS; i += 1 + 2 * (i == 2)) /* tensors, flat, full */
        for (int32_t to = 3; to <= all_info.ranks; to++)
            check_numbers_of_ranks(i, 2, to);
    check_numbers_of_ranks(2, all_info.ranks, 2);
    check_numbers_of_ranks(4, all_info.ranks, 2);
}

/* If one rank fails, all ranks get the error, the old file stays, and the next save succeeds. */
TD_BODY(a_failure_is_told_to_all_and_leaves_the_old_file)
{
    static const struct {
        int fails, rank;
        const char *message;
    } cases[] = {{WRITE, 1, "rank 1: cannot write 'shard-save.safetensors': No space left"},
                 {WRITE, 0, "rank 0: cannot write 'shard-save.safetensors': No space left"},
                 {WRITE, -1, "rank 0: cannot write 'shard-save.safetensors': No space left"}, /* all ranks */
                 {SYNC, 1, "rank 1: cannot write 'shard-save.safetensors': Input/output error"},
                 {TRUNCATE, 0, "rank 0: cannot write"},
                 {RENAME, 0, "rank 0: cannot replace 'shard-save.safetensors'"}};
    shard_trainer t = open_trainer(2);
    size_t bytes;

    td_assert_ok(td_shard_save(shard_comm, t.train, path));
    char *file = file_read(path, &bytes);
    const int descriptor = dup(0);
    close(descriptor);
    shard_step(&t, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fails = cases[i].rank < 0 || all_info.rank == cases[i].rank ? cases[i].fails : NONE;
        td_assert_refused(td_shard_save(shard_comm, t.train, path), TD_IO_ERROR, cases[i].message);
        fails = NONE;
        assert_true(file_is(path, file, bytes));
        td_assert_ok(td_comm_barrier(shard_comm));
    }
    td_assert_refused(td_shard_save(shard_comm, t.train, "no-such-folder/file"), TD_IO_ERROR,
                      "rank 0: cannot write 'no-such-folder/file'");
    /* On rank 1 the path is another file than rank 0's: first none, then one with the name of rank 0's. */
    pid_t mine = getpid(), all[2];
    char name[64];
    td_assert_ok(td_comm_exchange(all_ranks, &mine, sizeof mine, all));
    snprintf(name, sizeof name, "elsewhere.%ld-0.partial", (long)all[0]);
    for (int i = 0; i < 2; i++) {
        td_assert_refused(td_shard_save(shard_comm, t.train, all_info.rank == 1 ? "elsewhere" : path),
                          TD_UNSUPPORTED, "rank 1: 'elsewhere.");
        file_write(name, "", 0);
    }
    unlink(name);
    assert_true(file_is(path, file, bytes));
    td_assert_ok(td_comm_barrier(shard_comm)); /* after it rank 0 has removed its unfinished file */
    assert_false(is_left());
    td_assert_ok(td_comm_barrier(shard_comm));
    td_assert_ok(td_shard_save(shard_comm, t.train, path));
    assert_false(file_is(path, file, bytes));
    assert_int_equal(dup(0), descriptor); /* all others are closed */
    close(descriptor);
    free(file);
    shard_close_trainer(&t);
}

/* The disk of one rank takes longer than `seconds`. Rank 0 waits for it twice: it also replaces the file. */
TD_BODY(a_rank_may_take_as_long_as_its_disk)
{
    const bool joined = join_within(2, 1);
    shard_trainer t = open_trainer(2);

    for (int rank = 0; rank < 2; rank++) {
        fails = all_info.rank == rank ? SLOW : NONE;
        td_assert_ok(td_shard_save(shard_comm, t.train, path));
    }
    fails = NONE;
    td_assert_ok(td_shard_restore(shard_comm, t.train, path));
    shard_close_trainer(&t);
    leave(joined);
}

/* Rank 1 makes no call. Rank 0 waits for it as long as the options say. */
TD_BODY(a_rank_that_does_not_come_is_named)
{
    for (int restores = 0; restores < 2; restores++) {
        const bool joined = join_within(2, 0.2);
        shard_trainer t = open_trainer(0);

        if (all_info.rank == 0)
            td_assert_refused((restores ? td_shard_restore : td_shard_save)(shard_comm, t.train, path),
                              TD_RANK_FAILED, ") is late, its last call");
        td_assert_ok(td_comm_barrier(all_ranks));
        shard_close_trainer(&t);
        if (joined)
            assert_int_equal(td_comm_close(shard_comm), TD_RANK_FAILED);
        leave(false);
    }
}

TD_BODY(what_does_not_fit_is_refused)
{
    shard_trainer t = open_trainer(2), whole = open_trainer(0);
    const bool odd = all_info.rank == 1;
    td_train_config config = shard_config_of(&settings[0]);
    const int64_t end = shard_weights_of(whole.train).elements;
    const td_optimizer_group some[] = {{{0, 64}, config.hyper},
                                       {{end - SHARD_VOCAB * 12, end}, config.hyper}};
    size_t bytes, header;
    td_train *other;

    shard_step(&t, 0);
    shard_step(&whole, 0);
    td_assert_ok(td_shard_save(shard_comm, t.train, path));
    char *file = file_read(path, &bytes);
    td_assert_refused(td_shard_save(shard_comm, odd ? NULL : t.train, path), TD_BAD_ARGUMENT,
                      "rank 1: train is NULL");
    td_assert_refused(td_shard_restore(shard_comm, t.train, odd ? "" : path), TD_BAD_ARGUMENT,
                      "rank 1: path is ");
    td_assert_refused(td_shard_restore(shard_comm, t.train, odd ? "no-such-file" : path), TD_IO_ERROR,
                      "rank 1: cannot open 'no-such-file'");
    td_assert_refused(td_train_save(t.train, path), TD_UNSUPPORTED, "td_shard_save");

    config.model.size.d_ff += 4;
    td_assert_ok(td_train_create(shard_dev, &config, &other));
    td_assert_refused(td_shard_save(shard_comm, other, path), TD_BAD_STATE,
                      "rank 0: the model has no weights");
    td_assert_refused(td_shard_restore(shard_comm, other, path), TD_BAD_ARGUMENT, "extent 0 is 20, needs 24");
    td_assert_ok(td_train_init(other, 7));
    td_assert_refused(td_shard_save(shard_comm, odd ? other : whole.train, path), TD_BAD_ARGUMENT,
                      "d_ff: rank 1 has 24, where rank 0 has 20");
    td_train_destroy(other);
    config = shard_config_of(&settings[0]);
    config.gain = 0.5f; /* as DDP's */
    td_assert_ok(td_train_create(shard_dev, &config, &other));
    td_assert_ok(td_train_init(other, 7));
    td_assert_refused(td_shard_save(shard_comm, odd ? other : whole.train, path), TD_BAD_ARGUMENT,
                      "steps so far: rank 1 has 0, where rank 0 has 1");
    td_train_destroy(other);

    config = shard_config_of(&settings[0]);
    config.hyper.kind = TD_OPTIMIZER_SGD;
    td_assert_ok(td_train_create(shard_dev, &config, &other));
    td_assert_refused(td_shard_restore(shard_comm, other, path), TD_BAD_ARGUMENT,
                      "rank 0: 'shard-save.safetensors' is of the optimizer 'adamw'");
    td_assert_refused(td_shard_restore(shard_comm, odd ? other : whole.train, path), TD_UNSUPPORTED,
                      "rank 1 has an optimizer with 0 moments of a weight, another rank has one with 2");
    td_train_destroy(other);

    config = shard_config_of(&settings[0]);
    config.groups = some;
    for (config.group_count = 1; config.group_count <= 2; config.group_count++) {
        td_assert_ok(td_train_create(shard_dev, &config, &other));
        td_assert_ok(td_train_init(other, 7));
        td_assert_refused(td_shard_save(shard_comm, other, path), TD_UNSUPPORTED,
                          "no rank updates the element 64");
        td_train_destroy(other);
    }
    config.group_count = 0;
    for (int idle = 0; idle < 2; idle++) { /* a rank that updates nothing */
        config.groups = all_info.rank == idle ? some : NULL;
        td_assert_ok(td_train_create(shard_dev, &config, &other));
        td_assert_ok(td_train_init(other, 7));
        td_assert_ok(td_shard_save(shard_comm, other, other_path));
        td_assert_ok(td_shard_restore(shard_comm, other, other_path));
        td_train_destroy(other);
    }

    /* After all of that both trainers are unchanged. */
    assert_file_is(file, bytes, &t);
    td_assert_ok(td_shard_save(shard_comm, whole.train, other_path));
    td_assert_ok(td_train_restore(whole.train, other_path)); /* all ranks read one file */

    /* Files of different steps: rank 1 has another file. */
    shard_step(&t, 1);
    td_assert_ok(td_shard_save(shard_comm, t.train, other_path));
    td_assert_refused(td_shard_restore(shard_comm, t.train, odd ? path : other_path), TD_BAD_ARGUMENT,
                      "steps in the file: rank 1 has 1, where rank 0 has 2");
    /* Rank 1's file differs in one bit, of the first moment after optimizer.step or of lm_head. */
    memcpy(&header, file, sizeof header);
    char *const first = file + 8 + header + 8, *const last = file + bytes - SHARD_VOCAB * 12 * sizeof(float);
    for (int i = 0; i < 2; i++) {
        *(i ? last : first) ^= 1;
        if (odd)
            file_write(other_path, file, bytes);
        td_assert_refused(td_shard_restore(shard_comm, t.train, odd ? other_path : path), TD_BAD_ARGUMENT,
                          "a hash of the file's tensors: rank 1 has");
        *(i ? last : first) ^= 1;
    }
    free(file);
    shard_close_trainer(&t);
    shard_close_trainer(&whole);
}

/* Reading fails on one rank after all checks. No rank then has weights, until a restore. */
TD_BODY(after_a_failed_read_no_rank_has_weights)
{
    shard_trainer t = open_trainer(3);
    size_t bytes;

    shard_step(&t, 0);
    td_assert_ok(td_shard_save(shard_comm, t.train, path));
    char *file = file_read(path, &bytes);
    reads_left = all_info.rank == 1 ? 120 : -1;
    td_assert_refused(td_shard_restore(shard_comm, t.train, path), TD_IO_ERROR, "rank 1: cannot read");
    reads_left = -1;
    td_assert_refused(td_transformer_save(td_train_model(t.train), "lost"), TD_BAD_STATE, "no weights");
    td_assert_refused(td_shard_save(shard_comm, t.train, path), TD_BAD_STATE, "the model has no weights");
    td_assert_ok(td_shard_restore(shard_comm, t.train, path));
    assert_file_is(file, bytes, &t);
    free(file);
    shard_close_trainer(&t);
}

/* ---- a rank that is killed ---- */

/* A rank is killed while it writes. All other ranks name it, and the old file is unchanged. */
static int killed(int rank)
{
    char name[32];
    shard_trainer t = open_trainer(3);
    size_t bytes;

    td_assert_ok(td_shard_save(shard_comm, t.train, path));
    char *file = file_read(path, &bytes);
    shard_step(&t, 0);
    fails = shard_info.rank == rank ? KILL : NONE;
    snprintf(name, sizeof name, "rank %d (process", rank);
    const td_status status = td_shard_save(shard_comm, t.train, path);
    const bool said = status == TD_RANK_FAILED && strstr(td_last_error(), name) != NULL;
    if (!said)
        fprintf(stderr, "rank %d: %s\n", (int)shard_info.rank, td_last_error());
    const bool kept = file_is(path, file, bytes) && (shard_info.rank > 0 || !is_left());
    free(file);
    shard_close_trainer(&t);
    (void)td_comm_close(shard_comm);
    td_device_close(shard_dev);
    return said && kept ? 0 : 1;
}

static int check_killed(int argc, char **argv, int killed_rank)
{
    int statuses[16] = {0}, wrong = 0, result;
    td_comm_backend backend;

    if (!td_ranks_possible(argc, argv, &backend, &result))
        return result;
    const int ranks = atoi(argv[2]);
    td_ranks_run_each(argv, ranks, 60, statuses);
    for (int rank = 0; rank < ranks; rank++)
        wrong += statuses[rank] != (rank == killed_rank ? 128 + SIGKILL : 0);
    return wrong;
}

/* A separate folder in the build folder, because tests with other arguments run at the same time. */
static void enter_folder(int argc, char **argv)
{
    char folder[256] = FOLDER "/shard_save";

    for (int i = 1; i < argc; i++) {
        const size_t at = strlen(folder);
        assert_true(snprintf(folder + at, sizeof folder - at, "_%s", argv[i]) < (int)(sizeof folder - at));
    }
    assert_true(mkdir(folder, 0700) == 0 || errno == EEXIST);
    assert_int_equal(chdir(folder), 0);
}

/* A weight goes in many pieces. */
int64_t __wrap_td_saving_bytes(void);
int64_t __wrap_td_saving_bytes(void)
{
    return 96;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_number_of_ranks_reads_a_file),
        cmocka_unit_test(ranks_go_on_from_a_file_with_the_same_bits),
        cmocka_unit_test(a_failure_is_told_to_all_and_leaves_the_old_file),
        cmocka_unit_test(a_rank_may_take_as_long_as_its_disk),
        cmocka_unit_test(a_rank_that_does_not_come_is_named),
        cmocka_unit_test(what_does_not_fit_is_refused),
        cmocka_unit_test(after_a_failed_read_no_rank_has_weights),
    };
    const struct CMUnitTest of_more[] = {cmocka_unit_test(any_number_of_ranks_reads_a_file)};
    const bool kills = argc > 4 && strcmp(argv[3], "killed") == 0;
    int result;

    if (kills && !td_ranks_inside())
        return check_killed(argc, argv, atoi(argv[4]));
    if (!td_ranks_begin(argc, argv, &shard_dev, &shard_comm, &result))
        return result;
    enter_folder(argc, argv);
    td_assert_ok(td_comm_describe(shard_comm, &shard_info));
    td_assert_ok(td_cpu_set_threads(1)); /* more ranks than processors */
    if (kills)
        return killed(atoi(argv[4]));
    all_ranks = shard_comm;
    all_info = shard_info;
    result = all_info.ranks > 2 ? cmocka_run_group_tests_name("numbers of ranks", of_more, NULL, NULL)
                                : cmocka_run_group_tests_name("2 ranks", tests, NULL, NULL);
    td_assert_ok(td_comm_close(shard_comm));
    td_device_close(shard_dev);
    return result;
}
