#include "base/record.h"

#include "support/compare.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- the nth allocation fails, the library's own and cJSON's alike ---- */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

static int64_t fail_in; /* 0: none fails */

static bool refuse(void)
{
    return fail_in > 0 && --fail_in == 0;
}

void *__wrap_malloc(size_t bytes)
{
    return refuse() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return refuse() ? NULL : __real_calloc(count, bytes);
}

/* ---- locks that fail ---- */

int __real_flock(int file, int operation);
int __wrap_flock(int file, int operation);

static int flock_error;  /* 0: none fails */
static int flock_errors; /* how often it does */

int __wrap_flock(int file, int operation)
{
    if (flock_errors > 0) {
        flock_errors--;
        errno = flock_error;
        return -1;
    }
    return __real_flock(file, operation);
}

/* ---- a folder of its own for every test ---- */

static char folder[] = "tandem-record-XXXXXX"; /* in the folder that the test runs in */
static char path[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/records.jsonl", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    fail_in = 0;
    flock_errors = 0;
    unlink(path);
    return rmdir(folder);
}

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* The whole file; free() it. */
static char *read_file(void)
{
    FILE *file = fopen(path, "r");
    char *text = calloc(1 << 20, 1);

    assert_non_null(file);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, file) < (1 << 20) - 1);
    fclose(file);
    return text;
}

static void assert_file(const char *want)
{
    char *got = read_file();

    assert_string_equal(got, want);
    free(got);
}

static td_record *make_record(void)
{
    td_record *record = NULL;

    td_assert_ok(td_record_create("flash_benchmarking", "flash", "c", &record));
    assert_non_null(record);
    return record;
}

/* A record whose text is known: its time is replaced. */
static td_record *make_known(void)
{
    td_record *record = make_record();

    td_assert_ok(td_record_set_string(record, "time", "T"));
    return record;
}

static const char known[] = "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\","
                            "\"status\":\"ok\",\"time\":\"T\"}";

static void assert_text(const td_record *record, const char *want)
{
    char *got = NULL;

    td_assert_ok(td_record_text(record, &got));
    assert_string_equal(got, want);
    td_record_text_free(got);
}

/* ---- what a record says ---- */

static void a_new_record_has_the_five_keys_and_the_time(void **state)
{
    time_t before = time(NULL);
    td_record *record = make_record();
    time_t after = time(NULL);
    char *text = NULL;
    struct tm utc = {0};

    (void)state;
    td_assert_ok(td_record_text(record, &text));
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    assert_int_equal(cJSON_GetArraySize(root), 5);
    assert_string_equal(cJSON_GetObjectItem(root, "deliverable")->valuestring, "flash_benchmarking");
    assert_string_equal(cJSON_GetObjectItem(root, "module")->valuestring, "flash");
    assert_string_equal(cJSON_GetObjectItem(root, "impl")->valuestring, "c");
    assert_string_equal(cJSON_GetObjectItem(root, "status")->valuestring, "ok");
    const char *stamp = cJSON_GetObjectItem(root, "time")->valuestring;
    const char *end = strptime(stamp, "%Y-%m-%dT%H:%M:%SZ", &utc);
    assert_true(end && *end == '\0');
    assert_true(timegm(&utc) >= before && timegm(&utc) <= after);
    cJSON_Delete(root);
    td_record_text_free(text);
    td_record_destroy(record);
}

static void paths_nest_and_values_replace(void **state)
{
    td_record *record = make_known();

    (void)state;
    td_assert_ok(td_record_set_integer(record, "case.batch", 4));
    td_assert_ok(td_record_set_string(record, "case.dtype", "bf16"));
    td_assert_ok(td_record_set_bool(record, "case.causal", true));
    td_assert_ok(td_record_set_number(record, "a.b.c.d", 0.5));
    td_assert_ok(td_record_set_integer(record, "case.batch", 8));
    td_assert_ok(td_record_set_string(record, "status", "oom"));
    td_assert_ok(td_record_set_bool(record, "a.b", false)); /* an object gives way to a value */
    assert_text(
        record,
        "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\",\"status\":\"oom\","
        "\"time\":\"T\",\"case\":{\"batch\":8,\"dtype\":\"bf16\",\"causal\":true},\"a\":{\"b\":false}}");
    td_record_destroy(record);
}

static void keys_differ_by_case(void **state)
{
    td_record *record = make_known();

    (void)state;
    td_assert_ok(td_record_set_integer(record, "Status", 1));
    assert_text(
        record,
        "{\"deliverable\":\"flash_benchmarking\",\"module\":\"flash\",\"impl\":\"c\",\"status\":\"ok\","
        "\"time\":\"T\",\"Status\":1}");
    td_record_destroy(record);
}

static void numbers_come_back_exactly(void **state)
{
    static const double numbers[] = {0.1, 1.0 / 3, 1e-300, -2.5e300, 0x1p-1074, 5364, 1.21};
    static const int64_t integers[] = {0, -1, INT64_MAX, INT64_MIN, (INT64_C(1) << 53) + 1};
    char *text;

    (void)state;
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        td_record *record = make_record();

        td_assert_ok(td_record_set_number(record, "x", numbers[i]));
        td_assert_ok(td_record_text(record, &text));
        assert_true(strtod(strstr(text, "\"x\":") + 4, NULL) == numbers[i]);
        td_record_text_free(text);
        td_record_destroy(record);
    }
    for (size_t i = 0; i < sizeof integers / sizeof integers[0]; i++) {
        td_record *record = make_record();

        td_assert_ok(td_record_set_integer(record, "x", integers[i]));
        td_assert_ok(td_record_text(record, &text));
        assert_true(strtoll(strstr(text, "\"x\":") + 4, NULL, 10) == integers[i]);
        td_record_text_free(text);
        td_record_destroy(record);
    }
}

static void what_json_cannot_hold_becomes_null(void **state)
{
    const double samples[] = {1, NAN, 2};
    td_record *record = make_known();
    char *text;

    (void)state;
    td_assert_ok(td_record_set_number(record, "nan", NAN));
    td_assert_ok(td_record_set_number(record, "inf", -INFINITY));
    td_assert_ok(td_record_set_samples(record, "samples", samples, 3));
    td_assert_ok(td_record_text(record, &text));
    assert_non_null(strstr(text, "\"nan\":null,\"inf\":null,\"samples\":[1,null,2]}"));
    td_record_text_free(text);
    td_record_destroy(record);
}

static void a_string_never_breaks_the_line(void **state)
{
    const char *value = "two\nlines, \"quotes\", a \\ and \x01, \xC3\xA9";
    td_record *record = make_record();
    char *text;

    (void)state;
    td_assert_ok(td_record_set_string(record, "machine", value));
    td_assert_ok(td_record_text(record, &text));
    assert_null(strchr(text, '\n'));
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    assert_string_equal(cJSON_GetObjectItem(root, "machine")->valuestring, value);
    cJSON_Delete(root);
    td_record_text_free(text);
    td_record_destroy(record);
}

static void statistics_and_samples(void **state)
{
    const double samples[] = {1.25, 1.5, 1.75, 2};
    td_record *record = make_known();
    td_stats stats;
    char *text;

    (void)state;
    td_assert_ok(td_stats_compute(samples, 3, &stats));
    td_assert_ok(td_record_set_stats(record, "ms", &stats));
    td_assert_ok(td_record_set_samples(record, "samples", samples, 4));
    td_assert_ok(td_record_set_samples(record, "none", NULL, 0));
    td_assert_ok(td_record_text(record, &text));
    assert_non_null(strstr(text, "\"ms\":{\"median\":1.5,\"mean\":1.5,\"std\":0.25,\"min\":1.25,\"max\":1.75,"
                                 "\"p95\":1.725,\"n\":3},\"samples\":[1.25,1.5,1.75,2],\"none\":[]}"));
    td_record_text_free(text);
    td_record_destroy(record);
}

/* ---- what a file gets ---- */

static void a_file_grows_line_by_line(void **state)
{
    td_record *record = make_known();
    char want[3 * sizeof known];

    (void)state;
    td_assert_ok(td_record_append(record, path)); /* made where it is missing */
    td_assert_ok(td_record_append(record, path));
    snprintf(want, sizeof want, "%s\n%s\n", known, known);
    assert_file(want);
    td_record_destroy(record);
}

static void a_torn_last_line_stays_alone(void **state)
{
    td_record *record = make_known();
    char want[3 * sizeof known];

    (void)state;
    write_file("{\"whole\":1}\n{\"deliver");
    td_assert_ok(td_record_append(record, path));
    snprintf(want, sizeof want, "{\"whole\":1}\n{\"deliver\n%s\n", known);
    assert_file(want);
    td_record_destroy(record);
}

static void writers_at_once_keep_their_lines_whole(void **state)
{
    enum { WRITERS = 4, LINES = 200 };
    td_record *record = make_known();
    pid_t children[WRITERS];

    (void)state;
    for (int w = 0; w < WRITERS; w++) {
        children[w] = fork();
        assert_true(children[w] >= 0);
        if (children[w] == 0) {
            int failures = 0;

            for (int i = 0; i < LINES; i++)
                failures += td_record_append(record, path) != TD_OK;
            _exit(failures != 0);
        }
    }
    for (int w = 0; w < WRITERS; w++) {
        int status = -1;

        assert_int_equal(waitpid(children[w], &status, 0), children[w]);
        assert_int_equal(status, 0);
    }
    char *text = read_file(), *rest = text;
    int lines = 0;
    for (char *line; (line = strsep(&rest, "\n")) && *line; lines++)
        assert_string_equal(line, known);
    assert_int_equal(lines, WRITERS * LINES);
    free(text);
    td_record_destroy(record);
}

static void what_is_no_regular_file_is_refused_at_once(void **state)
{
    static const char *const devices[] = {"/dev/full", "/dev/null", "/dev/zero"};
    td_record *record = make_known();

    (void)state;
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20); /* a FIFO that nobody reads would never open */
    td_assert_refused(td_record_append(record, path), TD_IO_ERROR, "not a regular file");
    td_assert_refused(td_record_append(record, path), TD_IO_ERROR, path);
    td_assert_refused(td_record_probe(path), TD_IO_ERROR, "not a regular file");
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

/* Another program's lock, under a signal every 20 ms whose handler lacks SA_RESTART: flock() returns early
 * then. */
static void a_lock_that_stays_is_an_error_after_a_while(void **state)
{
    const struct sigaction noted = {.sa_handler = note};
    const struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    td_record *record = make_known();
    struct timespec start;

    (void)state;
    write_file("{\"whole\":1}\n");
    int other = open(path, O_RDWR);
    assert_true(other >= 0);
    assert_int_equal(flock(other, LOCK_EX), 0);
    assert_int_equal(sigaction(SIGALRM, &noted, NULL), 0);
    assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
    clock_gettime(CLOCK_MONOTONIC, &start);
    td_status status = td_record_append(record, path);
    double seconds = seconds_since(start);
    assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
    assert_int_equal(status, TD_IO_ERROR);
    assert_non_null(strstr(td_last_error(), "another program has locked it"));
    assert_non_null(strstr(td_last_error(), path));
    assert_true(seconds >= 5 && seconds < 60);
    assert_file("{\"whole\":1}\n");
    td_assert_refused(td_record_probe(path), TD_IO_ERROR, "another program has locked it");
    close(other);
    td_assert_ok(td_record_probe(path));
    td_assert_ok(td_record_append(record, path));
    td_record_destroy(record);
}

static void a_lock_that_goes_is_waited_for(void **state)
{
    td_record *record = make_known();
    int ready[2];
    char byte;

    (void)state;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int file = open(path, O_RDWR | O_CREAT, 0600);

        if (file < 0 || flock(file, LOCK_EX) != 0 || write(ready[1], "x", 1) != 1)
            _exit(1);
        nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
        _exit(write(file, "{\"theirs\":1}\n", 13) != 13);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    td_assert_ok(td_record_append(record, path));
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    char *text = read_file();
    assert_ptr_equal(strstr(text, "{\"theirs\":1}\n"), text);
    assert_non_null(strstr(text, known));
    free(text);
    close(ready[0]);
    close(ready[1]);
    td_record_destroy(record);
}

/* A file system without locks: the line is written, and what a full disk tore off stays, for another's line
 * might stand behind it; the next writer begins a line of its own. */
static void without_locks_nothing_is_cut_off(void **state)
{
    td_record *record = make_known();
    struct rlimit old, small;
    char want[2 * sizeof known + 64];

    (void)state;
    write_file("{\"whole\":1}\n");
    flock_error = ENOLCK;
    flock_errors = 3;
    td_assert_ok(td_record_probe(path));
    td_assert_ok(td_record_append(record, path));
    snprintf(want, sizeof want, "{\"whole\":1}\n%s\n", known);
    assert_file(want);

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN);
    small = old;
    small.rlim_cur = strlen(want) + 5;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    td_status status = td_record_append(record, path);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, TD_IO_ERROR);
    snprintf(want, sizeof want, "{\"whole\":1}\n%s\n%.5s", known, known);
    assert_file(want);
    assert_int_equal(flock_errors, 0);

    flock_error = EINTR; /* a signal at the wrong moment: once more */
    flock_errors = 2;
    td_assert_ok(td_record_append(record, path));
    assert_int_equal(flock_errors, 0);
    td_record_destroy(record);
}

/* A disk that fills up inside the line: the kernel takes what fits, and that part must not stay. */
static void a_disk_that_fills_up_leaves_the_earlier_lines_alone(void **state)
{
    static const char *before[] = {"{\"whole\":1}\n", "{\"whole\":1}\n{\"torn"};
    td_record *record = make_known();
    struct rlimit old, small;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    signal(SIGXFSZ, SIG_IGN); /* the library leaves signals to the program */
    for (int b = 0; b < 2; b++)
        for (rlim_t room = 0; room < sizeof known; room += 13) {
            write_file(before[b]);
            small = old;
            small.rlim_cur = strlen(before[b]) + room;
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
            td_forget_error();
            td_status status = td_record_append(record, path);
            assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
            assert_int_equal(status, TD_IO_ERROR);
            assert_non_null(strstr(td_last_error(), path));
            assert_non_null(strstr(td_last_error(), strerror(EFBIG)));
            assert_file(before[b]);
        }
    signal(SIGXFSZ, SIG_DFL);
    td_assert_ok(td_record_append(record, path)); /* with room again it goes on */
    td_record_destroy(record);
}

static void paths_that_cannot_be_written_are_errors(void **state)
{
    td_record *record = make_known();
    char below[96];

    (void)state;
    write_file("{\"whole\":1}\n");
    snprintf(below, sizeof below, "%s/records.jsonl", path);
    td_assert_refused(td_record_append(record, folder), TD_IO_ERROR, "Is a directory");
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, "Not a directory");
    snprintf(below, sizeof below, "%s/missing/records.jsonl", folder);
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, "No such file or directory");
    td_assert_refused(td_record_append(record, below), TD_IO_ERROR, below);
    assert_file("{\"whole\":1}\n");
    td_record_destroy(record);
}

static void a_read_only_folder_and_file_are_errors(void **state)
{
    td_record *record = make_known();

    (void)state;
    write_file("{\"whole\":1}\n");
    if (geteuid() == 0) { /* permissions do not hold root back: become nobody in a child */
        int status = -1;
        pid_t child = fork();

        assert_true(child >= 0);
        if (child == 0) {
            int refused = 0;

            if (chmod(folder, 0555) != 0 || chmod(path, 0444) != 0 || setuid(65534) != 0)
                _exit(100);
            refused += td_record_append(record, path) == TD_IO_ERROR;
            refused += strstr(td_last_error(), "Permission denied") != NULL;
            unlink(path); /* the folder is read-only as well: this must fail too */
            refused += td_record_append(record, path) == TD_IO_ERROR;
            _exit(refused);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 3);
    } else {
        assert_int_equal(chmod(path, 0444), 0);
        assert_int_equal(chmod(folder, 0555), 0);
        td_assert_refused(td_record_append(record, path), TD_IO_ERROR, "Permission denied");
    }
    assert_int_equal(chmod(folder, 0755), 0);
    assert_file("{\"whole\":1}\n");
    td_record_destroy(record);
}

/* ---- refusals ---- */

static void bad_input_is_refused_with_the_reason(void **state)
{
    static const struct {
        const char *path, *words;
    } paths[] = {
        {NULL, "path is NULL"},
        {"", "path is '', which has an empty part"},
        {".", "empty part"},
        {".a", "path is '.a', which has an empty part"},
        {"a.", "path is 'a.', which has an empty part"},
        {"a..b", "path is 'a..b', which has an empty part"},
        {"module.name", "path is 'module.name', but 'module' is no object"},
        {"case.batch.size", "path is 'case.batch.size', but 'batch' is no object"},
        {"a.bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
         "longer than 63 bytes"},
        {"a.b.c.d.e.f.g.h.i", "path has 9 parts, needs at most 8"},
        {"case.\xff", "path is not UTF-8: byte 5 is 0xff"},
    };
    static const struct {
        const char *text, *words;
    } strings[] = {
        {"\x80", "value is not UTF-8: byte 0 is 0x80"},
        {"caf\xe9", "value is not UTF-8: byte 3 is 0xe9"},
        {"\xc0\xaf", "byte 0 is 0xc0"},         /* a slash in two bytes */
        {"\xe0\x9f\xbf", "byte 0 is 0xe0"},     /* U+07FF in three */
        {"\xf0\x8f\xbf\xbf", "byte 0 is 0xf0"}, /* U+FFFF in four */
        {"ok \xed\xa0\x80", "byte 3 is 0xed"},  /* half of a pair of surrogates */
        {"\xf4\x90\x80\x80", "byte 0 is 0xf4"}, /* U+110000 */
        {"\xf5\x80\x80\x80", "byte 0 is 0xf5"}, /* no lead at all */
        {"\xe2\x82", "byte 0 is 0xe2"},         /* ends in mid-character */
        {"\xe2\x82z", "byte 0 is 0xe2"},
    };
    static const char *const good[] = {"",
                                       "caf\xc3\xa9",
                                       "\xdf\xbf",
                                       "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xef\xbf\xbf",
                                       "\xf0\x90\x80\x80",
                                       "\xf4\x8f\xbf\xbf"};
    static const char *const empty[] = {NULL, ""};
    const double samples[] = {1};
    const td_stats stats = {.n = 1};
    td_record *record = make_known(), *made;
    char *before, *text;

    (void)state;
    td_assert_ok(td_record_set_integer(record, "case.batch", 4));
    td_assert_ok(td_record_text(record, &before));
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        td_assert_refused(td_record_set_string(record, paths[i].path, "x"), TD_BAD_ARGUMENT, paths[i].words);
        td_assert_refused(td_record_set_number(record, paths[i].path, 1), TD_BAD_ARGUMENT, paths[i].words);
        td_assert_refused(td_record_set_integer(record, paths[i].path, 1), TD_BAD_ARGUMENT, paths[i].words);
        td_assert_refused(td_record_set_bool(record, paths[i].path, true), TD_BAD_ARGUMENT, paths[i].words);
        td_assert_refused(td_record_set_stats(record, paths[i].path, &stats), TD_BAD_ARGUMENT,
                          paths[i].words);
        td_assert_refused(td_record_set_samples(record, paths[i].path, samples, 1), TD_BAD_ARGUMENT,
                          paths[i].words);
    }
    td_assert_refused(td_record_set_string(NULL, "x", "y"), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_number(NULL, "x", 1), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_integer(NULL, "x", 1), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_bool(NULL, "x", true), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_stats(NULL, "x", &stats), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_samples(NULL, "x", samples, 1), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_set_string(record, "x", NULL), TD_BAD_ARGUMENT, "value is NULL");
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++)
        td_assert_refused(td_record_set_string(record, "x", strings[i].text), TD_BAD_ARGUMENT,
                          strings[i].words);
    td_assert_refused(td_record_set_stats(record, "x", NULL), TD_BAD_ARGUMENT, "stats is NULL");
    td_assert_refused(td_record_set_samples(record, "x", NULL, 1), TD_BAD_ARGUMENT, "samples is NULL");
    td_assert_refused(td_record_set_samples(record, "x", samples, -1), TD_BAD_ARGUMENT, "count is -1");
    td_assert_refused(td_record_set_samples(record, "x", samples, INT64_C(1) << 31), TD_BAD_ARGUMENT,
                      "count is 2147483648");
    td_assert_refused(td_record_text(NULL, &text), TD_BAD_ARGUMENT, "record is NULL");
    assert_null(text);
    td_assert_refused(td_record_text(record, NULL), TD_BAD_ARGUMENT, "out is NULL");
    td_assert_refused(td_record_append(NULL, path), TD_BAD_ARGUMENT, "record is NULL");
    td_assert_refused(td_record_append(record, NULL), TD_BAD_ARGUMENT, "path is NULL or empty");
    td_assert_refused(td_record_append(record, ""), TD_BAD_ARGUMENT, "path is NULL or empty");
    td_assert_refused(td_record_probe(NULL), TD_BAD_ARGUMENT, "path is NULL or empty");
    td_assert_refused(td_record_probe(""), TD_BAD_ARGUMENT, "path is NULL or empty");
    assert_text(record, before);
    td_record_text_free(before);
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        td_assert_ok(td_record_set_string(record, "x", good[i]));
    td_assert_ok(td_record_set_integer(record, "a.b.c.d.e.f.g.h", 1)); /* 8 parts */
    td_record_destroy(record);
    td_record_destroy(NULL);
    td_record_text_free(NULL);

    for (int i = 0; i < 2; i++) {
        made = (td_record *)&made; /* create must overwrite it */
        td_assert_refused(td_record_create(empty[i], "m", "c", &made), TD_BAD_ARGUMENT,
                          "deliverable is NULL");
        assert_null(made);
        td_assert_refused(td_record_create("d", empty[i], "c", &made), TD_BAD_ARGUMENT, "module is NULL");
        td_assert_refused(td_record_create("d", "m", empty[i], &made), TD_BAD_ARGUMENT, "impl is NULL");
        assert_null(made);
    }
    td_assert_refused(td_record_create("\x80", "m", "c", &made), TD_BAD_ARGUMENT, "deliverable is not UTF-8");
    td_assert_refused(td_record_create("d", "\x80", "c", &made), TD_BAD_ARGUMENT, "module is not UTF-8");
    td_assert_refused(td_record_create("d", "m", "\x80", &made), TD_BAD_ARGUMENT, "impl is not UTF-8");
    assert_null(made);
    td_assert_refused(td_record_create("d", "m", "c", NULL), TD_BAD_ARGUMENT, "out is NULL");
}

/* What a caller might build from a file: cJSON's printing would end on the stack. */
static void a_path_of_a_hundred_thousand_parts_is_refused(void **state)
{
    enum { PARTS = 100000 };
    td_record *record = make_known();
    char *deep = calloc(2 * PARTS, 1);

    (void)state;
    assert_non_null(deep);
    for (int i = 0; i < 2 * PARTS - 1; i++)
        deep[i] = i % 2 ? '.' : 'a';
    td_assert_refused(td_record_set_integer(record, deep, 1), TD_BAD_ARGUMENT,
                      "path has 100000 parts, needs at most 8");
    assert_text(record, known);
    free(deep);
    td_record_destroy(record);
}

/* ---- allocations that fail ---- */

static void create_undoes_itself_at_every_allocation(void **state)
{
    int64_t nth = 0;
    td_status status;

    (void)state;
    do {
        td_record *record = (td_record *)&record;

        td_forget_error();
        fail_in = ++nth;
        status = td_record_create("d", "m", "c", &record);
        fail_in = 0;
        if (status == TD_OK) {
            td_record_destroy(record);
        } else {
            assert_int_equal(status, TD_NO_MEMORY);
            assert_null(record);
            assert_non_null(strstr(td_last_error(), "no memory for a record"));
        }
    } while (status != TD_OK);
    assert_in_range(nth, 10, 100); /* a loop that injected nothing proves nothing */
}

typedef td_status change(td_record *record);

static td_status set_deep(td_record *record)
{
    return td_record_set_string(record, "new.objects.on.the.way", "a value longer than what it replaces");
}

static td_status set_shared(td_record *record)
{
    return td_record_set_integer(record, "case.seq", 128);
}

static td_status replace_value(td_record *record)
{
    return td_record_set_string(record, "case.batch", "replaced");
}

static td_status replace_stats(td_record *record)
{
    const td_stats stats = {.n = 1, .mean = 2};

    return td_record_set_stats(record, "ms", &stats);
}

static td_status set_samples(td_record *record)
{
    const double samples[] = {1, 2, 3};

    return td_record_set_samples(record, "samples", samples, 3);
}

static td_status set_flag(td_record *record)
{
    return td_record_set_bool(record, "case.causal", true);
}

static td_status set_number(td_record *record)
{
    return td_record_set_number(record, "tflops", 359.25);
}

static void changes_happen_whole_or_not_at_all(void **state)
{
    change *const changes[] = {set_deep,    set_shared, replace_value, replace_stats,
                               set_samples, set_flag,   set_number};

    (void)state;
    for (size_t c = 0; c < sizeof changes / sizeof changes[0]; c++) {
        td_record *record = make_known();
        int64_t nth = 0;
        char *before, *after;
        td_status status;

        td_assert_ok(td_record_set_integer(record, "case.batch", 4));
        td_assert_ok(td_record_set_integer(record, "ms", 4));
        td_assert_ok(td_record_text(record, &before));
        do {
            fail_in = ++nth;
            status = changes[c](record);
            fail_in = 0;
            if (status != TD_OK) {
                assert_int_equal(status, TD_NO_MEMORY);
                assert_text(record, before);
            }
        } while (status != TD_OK);
        td_assert_ok(td_record_text(record, &after));
        assert_string_not_equal(before, after);
        assert_in_range(nth, 3, 100);
        td_record_text_free(before);
        td_record_text_free(after);
        td_record_destroy(record);
    }
}

static void append_without_memory_leaves_the_file_alone(void **state)
{
    td_record *record = make_known();
    int64_t nth = 0;
    td_status status;

    (void)state;
    write_file("{\"whole\":1}\n");
    do {
        fail_in = ++nth;
        status = td_record_append(record, path);
        fail_in = 0;
        if (status != TD_OK) {
            assert_int_equal(status, TD_NO_MEMORY);
            assert_file("{\"whole\":1}\n");
        }
    } while (status != TD_OK);
    assert_in_range(nth, 3, 100);
    td_record_destroy(record);
}

int main(void)
{
    cJSON_Hooks hooks = {__wrap_malloc, free};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_record_has_the_five_keys_and_the_time),
        cmocka_unit_test(paths_nest_and_values_replace),
        cmocka_unit_test(keys_differ_by_case),
        cmocka_unit_test(numbers_come_back_exactly),
        cmocka_unit_test(what_json_cannot_hold_becomes_null),
        cmocka_unit_test(a_string_never_breaks_the_line),
        cmocka_unit_test(statistics_and_samples),
        cmocka_unit_test_setup_teardown(a_file_grows_line_by_line, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_torn_last_line_stays_alone, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(writers_at_once_keep_their_lines_whole, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(what_is_no_regular_file_is_refused_at_once, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_lock_that_stays_is_an_error_after_a_while, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(a_lock_that_goes_is_waited_for, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(without_locks_nothing_is_cut_off, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_disk_that_fills_up_leaves_the_earlier_lines_alone, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(paths_that_cannot_be_written_are_errors, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(a_read_only_folder_and_file_are_errors, make_folder, remove_folder),
        cmocka_unit_test(bad_input_is_refused_with_the_reason),
        cmocka_unit_test(a_path_of_a_hundred_thousand_parts_is_refused),
        cmocka_unit_test(create_undoes_itself_at_every_allocation),
        cmocka_unit_test(changes_happen_whole_or_not_at_all),
        cmocka_unit_test_setup_teardown(append_without_memory_leaves_the_file_alone, make_folder,
                                        remove_folder),
    };

    cJSON_InitHooks(&hooks); /* libcjson's own calls never pass --wrap */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
