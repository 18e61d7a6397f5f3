/* Files of records: lines stay whole if several processes write; locks, full disks, and files that cannot be
 * written. */
#include "base/record.h"

#include "support/compare.h"
#include "support/record_kit.h"
#include "support/test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- locks that fail ---- */

int __real_flock(int file, int operation);

static int flock_error;  /* 0: none fails */
static int flock_errors; /* number of calls that fail */

int __wrap_flock(int file, int operation)
{
    if (flock_errors > 0) {
        flock_errors--;
        errno = flock_error;
        return -1;
    }
    return __real_flock(file, operation);
}

static int remove_folder(void **unused)
{
    flock_errors = 0;
    return record_folder_remove(unused);
}

/* ---- contents of a file ---- */

TD_TEST(a_file_grows_line_by_line)
{
    td_record *record = record_make_known();
    char want[3 * sizeof record_known];

    td_assert_ok(td_record_append(record, record_path)); /* creates a missing file */
    td_assert_ok(td_record_append(record, record_path));
    snprintf(want, sizeof want, "%s\n%s\n", record_known, record_known);
    record_assert_file(want);
    td_record_destroy(record);
}

TD_TEST(a_torn_last_line_stays_alone)
{
    td_record *record = record_make_known();
    char want[3 * sizeof record_known];

    record_file_write("{\"whole\":1}\n{\"deliver");
    td_assert_ok(td_record_append(record, record_path));
    snprintf(want, sizeof want, "{\"whole\":1}\n{\"deliver\n%s\n", record_known);
    record_assert_file(want);
    td_record_destroy(record);
}

TD_TEST(writers_at_once_keep_their_lines_whole)
{
    enum { WRITERS = 4, LINES = 200 };
    td_record *record = record_make_known();
    pid_t children[WRITERS];

    for (int w = 0; w < WRITERS; w++) {
        children[w] = fork();
        assert_true(children[w] >= 0);
        if (children[w] == 0) {
            int failures = 0;

            for (int i = 0; i < LINES; i++)
                failures += td_record_append(record, record_path) != TD_OK;
            _exit(failures != 0);
        }
    }
    for (int w = 0; w < WRITERS; w++) {
        int status = -1;

        assert_int_equal(waitpid(children[w], &status, 0), children[w]);
        assert_int_equal(status, 0);
    }
    char *text = record_file_read(), *rest = text;
    int lines = 0;
    for (char *line; (line = strsep(&rest, "\n")) && *line; lines++)
        assert_string_equal(line, record_known);
    assert_int_equal(lines, WRITERS * LINES);
    free(text);
    td_record_destroy(record);
}

TD_TEST(what_is_no_regular_file_is_refused_at_once)
{
    static const char *const devices[] = {"/dev/full", "/dev/null", "/dev/zero"};
    td_record *record = record_make_known();

    assert_int_equal(mkfifo(record_path, 0600), 0);
    alarm(20); /* opening a FIFO without a reader would never return */
    td_assert_refused(td_record_append(record, record_path), TD_IO_ERROR, "not a regular file");
    td_assert_refused(td_record_append(record, record_path), TD_IO_ERROR, record_path);
    td_assert_refused(td_record_probe(record_path), TD_IO_ERROR, "not a regular file");
    alarm(0);
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        td_assert_refused(td_record_append(record, devices[i]), TD_IO_ERROR, "not a regular file");
        td_assert_refused(td_record_append(record, devices[i]), TD_IO_ERROR, devices[i]);
    }
    td_record_destroy(record);
}

/* ---- locks ---- */

static void note(int signal)
{
    (void)signal;
}

static double seconds_since(struct timespec start)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9;
}

/* Another program has the lock, while a signal whose handler lacks SA_RESTART arrives every 20 ms: flock()
 * then returns early. */
TD_TEST(a_lock_that_stays_is_an_error_after_a_while)
{
    const struct sigaction noted = {.sa_handler = note};
    const struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    td_record *record = record_make_known();
    struct timespec start;

    record_file_write("{\"whole\":1}\n");
    int other = open(record_path, O_RDWR);
    assert_true(other >= 0);
    assert_int_equal(flock(other, LOCK_EX), 0);
    assert_int_equal(sigaction(SIGALRM, &noted, NULL), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    clock_gettime(CLOCK_MONOTONIC, &start);
    td_status status = td_record_append(record, record_path);
    double seconds = seconds_since(start);
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(status, TD_IO_ERROR);
    assert_non_null(strstr(td_last_error(), "another program has locked it"));
    assert_non_null(strstr(td_last_error(), record_path));
    assert_true(seconds >= 5 && seconds < 60);
    record_assert_file("{\"whole\":1}\n");
    td_assert_refused(td_record_probe(record_path), TD_IO_ERROR, "another program has locked it");
    close(other);
    td_assert_ok(td_record_probe(record_path));
    td_assert_ok(td_record_append(record, record_path));
    td_record_destroy(record);
}

/* As `parity prune` does: after the wait for the lock, another file has the name. */
TD_TEST(a_file_that_is_replaced_meanwhile_gets_the_line)
{
    td_record *record = record_make_known();
    char other[sizeof record_path + 4], want[sizeof record_known + 32];
    int ready[2];
    char byte;

    snprintf(other, sizeof other, "%s.new", record_path);
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int file = open(record_path, O_RDWR | O_CREAT, 0600);
        int new = open(other, O_RDWR | O_CREAT, 0600);

        if (file < 0 || new < 0 || flock(file, LOCK_EX) != 0 || write(ready[1], "x", 1) != 1)
            _exit(1);
        nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
        _exit(write(new, "{\"theirs\":1}\n", 13) != 13 || rename(other, record_path) != 0);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    td_assert_ok(td_record_append(record, record_path));
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    snprintf(want, sizeof want, "{\"theirs\":1}\n%s\n", record_known);
    record_assert_file(want);
    close(ready[0]);
    close(ready[1]);
    td_record_destroy(record);
}

TD_TEST(a_lock_that_goes_is_waited_for)
{
    td_record *record = record_make_known();
    int ready[2];
    char byte;

    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int file = open(record_path, O_RDWR | O_CREAT, 0600);

        if (file < 0 || flock(file, LOCK_EX) != 0 || write(ready[1], "x", 1) != 1)
            _exit(1);
        nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
        _exit(write(file, "{\"theirs\":1}\n", 13) != 13);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    td_assert_ok(td_record_append(record, record_path));
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    char *text = record_file_read();
    assert_ptr_equal(strstr(text, "{\"theirs\":1}\n"), text);
    assert_non_null(strstr(text, record_known));
    free(text);
    close(ready[0]);
    close(ready[1]);
    td_record_destroy(record);
}

/* A file system without locks: the line is written. A part of a line from a full disk stays, because another
 * process's line might follow it. The next writer begins a new line. */
TD_TEST(without_locks_nothing_is_cut_off)
{
    td_record *record = record_make_known();
    struct rlimit old, small;
    char want[2 * sizeof record_known + 64];

    record_file_write("{\"whole\":1}\n");
    flock_error = ENOLCK;
    flock_errors = 3;
    td_assert_ok(td_record_probe(record_path));
    td_assert_ok(td_record_append(record, record_path));
    snprintf(want, sizeof want, "{\"whole\":1}\n%s\n", record_known);
    record_assert_file(want);

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    small = old;
    small.rlim_cur = strlen(want) + 5;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    td_status status = td_record_append(record, record_path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, TD_IO_ERROR);
    snprintf(want, sizeof want, "{\"whole\":1}\n%s\n%.5s", record_known, record_known);
    record_assert_file(want);
    assert_int_equal(flock_errors, 0);

    flock_error = EINTR; /* a signal during flock: it is called again */
    flock_errors = 2;
    td_assert_ok(td_record_append(record, record_path));
    assert_int_equal(flock_errors, 0);
    td_record_destroy(record);
}

/* A disk becomes full inside the line: the kernel writes a part, and the library must remove that part. */
TD_TEST(a_disk_that_fills_up_leaves_the_earlier_lines_alone)
{
    static const char *before[] = {"{\"whole\":1}\n", "{\"whole\":1}\n{\"torn"};
    td_record *record = record_make_known();
    struct rlimit old, small;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN); /* the library does not handle signals */
    for (int b = 0; b < 2; b++)
        for (rlim_t room = 0; room < sizeof record_known; room += 13) {
            record_file_write(before[b]);
            small = old;
            small.rlim_cur = strlen(before[b]) + room;
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
            td_forget_error();
            td_status status = td_record_append(record, record_path);
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
            assert_int_equal(status, TD_IO_ERROR);
            assert_non_null(strstr(td_last_error(), record_path));
            assert_non_null(strstr(td_last_error(), strerror(EFBIG)));
            record_assert_file(before[b]);
        }
    signal(SIGXFSZ, SIG_DFL);
    td_assert_ok(td_record_append(record, record_path)); /* with free space the next line is written */
    td_record_destroy(record);
}

TD_TEST(paths_that_cannot_be_written_are_errors)
{
    td_record *record = record_make_known();
    char below[96];

    record_file_write("{\"whole\":1}\n");
    snprintf(below, sizeof below, "%s/records.jsonl", record_path);
    td_assert_refused(td_record_append(record, record_folder), TD_IO_ERROR, "Is a directory");
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, "Not a directory");
    snprintf(below, sizeof below, "%s/missing/records.jsonl", record_folder);
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, "No such file or directory");
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, below);
    record_assert_file("{\"whole\":1}\n");
    td_record_destroy(record);
}

TD_TEST(a_read_only_folder_and_file_are_errors)
{
    td_record *record = record_make_known();

    record_file_write("{\"whole\":1}\n");
    if (geteuid() == 0) { /* root ignores permissions: a child becomes another user */
        int status = -1;
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0) {
            int refused = 0;

            if (chmod(record_folder, 0555) != 0 || chmod(record_path, 0444) != 0 || setuid(65534) != 0)
                _exit(100);
            refused += td_record_append(record, record_path) == TD_IO_ERROR;
            refused += strstr(td_last_error(), "Permission denied") != NULL;
            unlink(record_path); /* the folder is read-only too: this must fail */
            refused += td_record_append(record, record_path) == TD_IO_ERROR;
            _exit(refused);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 3);
    } else {
        assert_int_equal(chmod(record_path, 0444), 0);
        assert_int_equal(chmod(record_folder, 0555), 0);
        td_assert_refused(td_record_append(record, record_path), TD_IO_ERROR, "Permission denied");
    }
    assert_int_equal(chmod(record_folder, 0755), 0);
    record_assert_file("{\"whole\":1}\n");
    td_record_destroy(record);
}

TD_TEST(what_is_not_given_is_refused)
{
    td_record *record = record_make();

    td_assert_refused(td_record_append(NULL, record_path), TD_BAD_ARGUMENT, "record is NULL");
    td_record_destroy(record);
}

TD_MAIN_EACH("files of records", record_folder_make, remove_folder, NULL, NULL)
