#include "support/attention_kit.h"

#include "base/file.h"
#include "device/listen.h"
#include "flash/flash.h"
#include "jit/code.h"
#include "jit/compiler.h"
#include "jit/jit.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[] = "/tmp/tandem-test-jit-XXXXXX"; /* the folder of all files of this test */

/* ---- doubles ---- */

static int full_disk; /* the number of next writes of partial files that fail */

td_status __real_td_replacement_write(td_replacement *file, const void *data, size_t bytes);

td_status __wrap_td_replacement_write(td_replacement *file, const void *data, size_t bytes)
{
    if (full_disk > 0) {
        full_disk--;
        file->failed = true;
        return td_file_error("write", file->partial, ENOSPC);
    }
    return __real_td_replacement_write(file, data, bytes);
}

void *__real_calloc(size_t count, size_t bytes);
static int calloc_fails_in;

void *__wrap_calloc(size_t count, size_t bytes)
{
    return calloc_fails_in > 0 && --calloc_fails_in == 0 ? NULL : __real_calloc(count, bytes);
}

/* ---- compilers ---- */

static void write_file(const char *path, const char *text, mode_t mode)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    assert_int_equal(chmod(path, mode), 0);
}

/** A compiler that answers questions about its version, and runs `instead` when it must compile. */
static const char *false_compiler(const char *name, const char *instead)
{
    static char path[160];
    char text[700];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(text, sizeof text,
             "#!/bin/sh\nself=$0\ncase \" $* \" in *\" -dM \"*) echo '#define __STDC__ 1'; exit 0;; esac\n"
             "while [ $# -gt 2 ]; do [ \"$1\" = -o ] && out=$2; shift; done\n%s\n",
             instead);
    write_file(path, text, 0700);
    return path;
}

/** A compiler that compiles each pass of the small problem once, and later only copies the result. */
static const char *quick(void)
{
    static char path[160];
    char text[400];

    if (path[0] == '\0') {
        snprintf(text, sizeof text,
                 "made=%s/made$(grep -c '^#define BACKWARD 1' \"$2\")\n"
                 "[ -f $made ] || cc -O1 -march=native -shared -fPIC -w -o $made \"$2\"\ncp $made \"$out\"",
                 folder);
        snprintf(path, sizeof path, "%s", false_compiler("quick", text));
    }
    return path;
}

/* ---- a device, its folder, and a small problem ---- */

static td_device *open_jit(const char *compiler, const char *cache)
{
    td_device *dev;

    td_assert_ok(td_device_open("cpu", &dev));
    td_assert_ok(td_jit_configure(dev, &(td_jit_options){.compiler = compiler, .cache = cache}));
    return dev;
}

/** Returns a folder for one test. */
static const char *cache_of(const char *name)
{
    static char path[128];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static const td_attention_shape small = {
    .batch = 1, .heads = 2, .seq = 21, .head_dim = 16, .dtype = TD_F32, .causal = true};
enum { SMALL = 2 * 21 * 16 };

/** Runs forward of the small problem. The result must agree with naive attention. */
static td_status attend(td_device *dev, const td_attention_shape *shape)
{
    static _Alignas(256) char work[1 << 22];
    float q[SMALL], k[SMALL], v[SMALL], o[SMALL], expected[SMALL];
    static float saved[2 * 21 * 21];
    double wide[SMALL];
    td_attention_sizes sizes;

    for (int i = 0; i < SMALL; i++) {
        q[i] = (float)(i * 37 % 101) / 50 - 1;
        k[i] = (float)(i * 53 % 97) / 50 - 1;
        v[i] = (float)(i * 29 % 89) / 50 - 1;
        o[i] = 777;
    }
    td_assert_ok(td_jit_sizes(dev, shape, &sizes));
    assert_true(sizes.forward_work <= sizeof work && sizes.saved <= sizeof saved);
    const td_status status = td_jit_forward(dev, shape, q, k, v, o, saved, work);
    if (status != TD_OK) {
        for (int i = 0; i < SMALL; i++)
            assert_true(o[i] == 777);
        return status;
    }
    td_assert_ok(td_attention_naive_forward(dev, shape, q, k, v, expected, saved, work));
    for (int i = 0; i < SMALL; i++)
        wide[i] = expected[i];
    td_assert_close("o", TD_F32, o, wide, SMALL, 2e-6);
    return status;
}

static td_jit_info info_of(td_device *dev)
{
    td_jit_info info;

    td_assert_ok(td_jit_info_of(dev, &info));
    return info;
}

/** Runs the small problem on a new device with this folder. */
static td_jit_info run_with(const char *compiler, const char *cache)
{
    td_device *dev = open_jit(compiler, cache);

    td_assert_ok(attend(dev, &small));
    const td_jit_info info = info_of(dev);
    td_device_close(dev);
    return info;
}

enum { HEAD = 51 }; /* bytes before the key of an entry */

/** Returns the only entry of a folder. Fails if there are others. */
static const char *entry_of(const char *cache)
{
    static char path[512];
    DIR *dir = opendir(cache);
    int count = 0;

    assert_non_null(dir);
    for (struct dirent *each; (each = readdir(dir));)
        if (each->d_name[0] != '.') {
            snprintf(path, sizeof path, "%s/%s", cache, each->d_name);
            count++;
        }
    closedir(dir);
    assert_int_equal(count, 1);
    return path;
}

static void assert_words(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("'%s' does not say '%s'", text, words);
}

/* ---- the shape for which code is made ---- */

static td_attention_shape written; /* the last shape for which a source was made */

static td_status open_nothing(td_device *dev, const td_jit_options *options, void **state,
                              const char **identity, char description[160])
{
    (void)dev;
    (void)options;
    *state = NULL;
    *identity = "nobody";
    snprintf(description, 160, "none");
    return TD_OK;
}

static void close_nothing(void *state)
{
    assert_null(state);
}

static td_status compile_nothing(void *state, const char *source, td_code *out)
{
    (void)state;
    *out = (td_code){(unsigned char *)strdup(source), strlen(source)};
    return TD_OK;
}

static td_status load_nothing(td_device *dev, const td_code *code, bool backward, void **loaded)
{
    (void)dev;
    (void)backward;
    *loaded = strdup((const char *)code->data);
    return TD_OK;
}

static void unload_nothing(td_device *dev, void *loaded)
{
    (void)dev;
    free(loaded);
}

static char *write_nothing(const td_attention_shape *shape, bool backward)
{
    (void)backward;
    written = *shape;
    return strdup("source");
}

/* Code may depend on all fields of a shape except these three. */
TD_TEST(only_batch_heads_and_determinism_make_no_other_code)
{
    static const td_toolchain toolchain = {.open = open_nothing,
                                           .close = close_nothing,
                                           .write = write_nothing,
                                           .compile = compile_nothing,
                                           .load = load_nothing,
                                           .unload = unload_nothing};
    const td_attention_shape first = {
        .batch = 2, .heads = 3, .seq = 5, .seq_k = 7, .head_dim = 8, .dtype = TD_F32, .scale = 0.5f};
    td_attention_shape shapes[] = {first, first, first, first, first, first, first, first, first};
    enum { SHAPES = sizeof shapes / sizeof *shapes, ALIKE = 2 };
    void *loaded[SHAPES];
    td_device *dev;

    shapes[1].batch = 1, shapes[1].heads = 1, shapes[1].deterministic = true;
    shapes[2].seq++, shapes[3].seq_k++, shapes[4].head_dim++, shapes[5].scale = 0.25f;
    shapes[6].dtype = TD_BF16, shapes[7].causal = true, shapes[8].o_bshd = true;
    td_assert_ok(td_device_open("cpu", &dev));
    for (int i = 0; i < SHAPES; i++) {
        memset(&written, 0, sizeof written);
        td_assert_ok(td_code_of(dev, &toolchain, &shapes[i], false, &loaded[i]));
        if (i > 0 && i < ALIKE) {
            assert_ptr_equal(loaded[i], loaded[0]);
            continue;
        }
        assert_true(written.seq == shapes[i].seq && written.seq_k == shapes[i].seq_k);
        assert_true(written.head_dim == shapes[i].head_dim && written.scale == shapes[i].scale);
        assert_true(written.dtype == shapes[i].dtype && written.causal == shapes[i].causal);
        assert_int_equal(written.o_bshd, shapes[i].o_bshd);
        for (int j = 0; j < i; j++)
            assert_true(loaded[i] != loaded[j]);
    }
    void *backward; /* compiled only when it is asked for */
    assert_int_equal(info_of(dev).compiled, SHAPES + 1 - ALIKE);
    td_assert_ok(td_code_of(dev, &toolchain, &first, true, &backward));
    assert_true(backward != loaded[0]);
    assert_int_equal(info_of(dev).compiled, SHAPES + 2 - ALIKE);
    td_device_close(dev);
}

/* ---- the folder ---- */

TD_TEST(code_is_compiled_once_and_then_loaded)
{
    const char *cache = cache_of("once/deeper");
    td_device *dev = open_jit(NULL, cache);
    td_attention_shape shape = small;

    assert_string_equal(info_of(dev).compiler, "");
    for (int i = 0; i < 3; i++)
        td_assert_ok(attend(dev, &shape));
    shape.mask = TD_MASK_ADD_1E6, shape.causal = false; /* an unused mask makes no other code */
    td_assert_ok(attend(dev, &shape));
    shape.mask = TD_MASK_INF;
    td_assert_ok(attend(dev, &shape));
    td_assert_ok(attend(dev, &small));
    td_jit_info info = info_of(dev);
    assert_int_equal(info.compiled, 2);
    assert_int_equal(info.loaded, 0);
    assert_true(info.compile_ms > 0 && info.find_ms > 0);
    assert_string_equal(info.note, "");
    assert_non_null(strchr(info.compiler, '/'));
    td_device_close(dev);

    info = run_with(NULL, cache);
    assert_int_equal(info.compiled, 0);
    assert_int_equal(info.loaded, 1);
    assert_true(info.load_ms > 0 && info.compile_ms == 0);
    info = run_with(NULL, NULL);
    assert_int_equal(info.compiled, 1);
}

TD_TEST(an_entry_that_is_not_whole_is_made_again)
{
    const char *cache = cache_of("corrupt");
    enum { CUT, FLIPPED, EMPTY, WORDS, LONGER, WAYS };

    (void)run_with(quick(), cache);
    for (int way = 0; way < WAYS; way++) {
        const char *path = entry_of(cache);
        const int file = open(path, O_RDWR);
        struct stat was;
        char byte;

        assert_true(file >= 0);
        assert_int_equal(fstat(file, &was), 0);
        if (way == CUT || way == EMPTY)
            assert_int_equal(ftruncate(file, way == CUT ? was.st_size / 2 : 0), 0);
        if (way == FLIPPED) {
            assert_int_equal(pread(file, &byte, 1, was.st_size - 9), 1);
            byte ^= 4;
            assert_int_equal(pwrite(file, &byte, 1, was.st_size - 9), 1);
        }
        if (way == WORDS)
            assert_int_equal(pwrite(file, "not ours", 8, 0), 8);
        if (way == LONGER)
            assert_int_equal(pwrite(file, "x", 1, was.st_size), 1);
        close(file);
        td_jit_info info = run_with(quick(), cache);
        assert_int_equal(info.rejected, 1);
        assert_int_equal(info.compiled, 1);
        assert_words(info.note, way == CUT || way == FLIPPED || way == LONGER ? "is corrupt" : "cut short");
        assert_words(info.note, "compiled again");
        info = run_with(quick(), cache);
        assert_int_equal(info.loaded, 1);
        assert_string_equal(info.note, "");
    }
}

/* The entry is complete, but it is no code. A checksum does not show that. */
TD_TEST(an_entry_that_cannot_be_loaded_is_made_again)
{
    const char *cache = cache_of("unloadable");
    unsigned char text[] = "no code at all";
    td_code entry;

    (void)run_with(quick(), cache);
    td_assert_ok(td_code_read(entry_of(cache), &entry));
    const char *const key = (char *)entry.data + HEAD;
    assert_int_equal(strncmp(key, "tandem jit ", 11), 0);
    td_assert_ok(td_store_write(cache, key, &(td_code){text, sizeof text}));
    td_code_free(&entry);
    (void)entry_of(cache); /* it has replaced the first entry */
    const td_jit_info info = run_with(quick(), cache);
    assert_int_equal(info.rejected, 1);
    assert_int_equal(info.compiled, 1);
    assert_words(info.note, "cannot be loaded");
}

/* If two keys have the same hash, the file names are equal. The key inside the entry shows the difference. */
TD_TEST(an_entry_of_another_key_is_stale)
{
    static const char *const keys[] = {"", "another", "tandem jit 2"};
    const char *cache = cache_of("stale");
    unsigned char text[] = "the code of another";
    char path[512], other[600];
    td_code entry, code;

    (void)run_with(quick(), cache);
    snprintf(path, sizeof path, "%s", entry_of(cache));
    td_assert_ok(td_code_read(path, &entry));
    const char *const own = (char *)entry.data + HEAD;
    char *const longer = malloc(strlen(own) + 2), *const shorter = strdup(own);
    sprintf(longer, "%s.", own);
    shorter[strlen(shorter) - 1] = '\0';
    for (int i = 0; i < 5; i++) {
        const char *const key = i < 3 ? keys[i] : i == 3 ? longer : shorter;

        td_assert_ok(td_store_write(cache, key, &(td_code){text, sizeof text}));
        assert_int_equal(td_store_read(cache, key, &code), TD_FOUND);
        assert_int_equal(code.bytes, sizeof text);
        assert_memory_equal(code.data, text, sizeof text);
        td_code_free(&code);
        assert_int_equal(unlink(path), 0);
        snprintf(other, sizeof other, "%s", entry_of(cache));
        assert_int_equal(rename(other, path), 0);
        assert_int_equal(td_store_read(cache, own, &code), TD_FOUND_BAD);
        assert_null(code.data);
        const td_jit_info info = run_with(quick(), cache);
        assert_int_equal(info.rejected, 1);
        assert_words(info.note, "is stale");
        assert_int_equal(run_with(quick(), cache).loaded, 1);
    }
    free(longer);
    free(shorter);
    td_code_free(&entry);
}

TD_TEST(what_others_may_write_is_not_run)
{
    static const mode_t modes[] = {0646, 0664};
    const char *cache = cache_of("others");

    (void)run_with(quick(), cache);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        assert_int_equal(chmod(entry_of(cache), modes[i]), 0);
        const td_jit_info info = run_with(quick(), cache);
        assert_int_equal(info.rejected, 1);
        assert_words(info.note, "other users can write it");
        assert_int_equal(run_with(quick(), cache).loaded, 1); /* our entry has replaced it */
    }
}

TD_TEST(own_entries_are_used_whatever_the_umask)
{
    const char *cache = cache_of("umask");
    const mode_t before = umask(0);

    const td_jit_info first = run_with(quick(), cache), second = run_with(quick(), cache);
    umask(before);
    assert_int_equal(first.compiled, 1);
    assert_int_equal(second.loaded, 1);
    assert_int_equal(second.rejected, 0);
}

TD_TEST(a_folder_that_is_not_one_costs_the_cache_alone)
{
    const char *cache = cache_of("file");

    write_file(cache, "", 0600);
    const td_jit_info info = run_with(quick(), cache);
    assert_int_equal(info.compiled, 1);
    assert_words(info.note, "Not a directory");
    assert_words(info.note, "only in memory");
    const td_jit_info below = run_with(quick(), cache_of("file/below"));
    assert_int_equal(below.compiled, 1);
    assert_words(below.note, "only in memory");
}

TD_TEST(an_entry_that_is_a_folder_stays_one)
{
    const char *cache = cache_of("entry");
    char path[512];

    (void)run_with(quick(), cache);
    snprintf(path, sizeof path, "%s", entry_of(cache));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    const td_jit_info info = run_with(quick(), cache);
    assert_int_equal(info.rejected, 1);
    assert_int_equal(info.compiled, 1);
    assert_words(info.note, "not a regular file");
}

/* Root can write to every folder except /proc, so /proc serves as a read-only folder. */
TD_TEST(a_read_only_folder_costs_the_cache_alone)
{
    const char *cache = cache_of("readonly");

    if (geteuid() != 0) {
        assert_int_equal(mkdir(cache, 0500), 0);
        assert_words(run_with(quick(), cache).note, "Permission denied");
    }
    const td_jit_info info = run_with(quick(), "/proc/tandem");
    assert_int_equal(info.compiled, 1);
    assert_words(info.note, "cannot make '/proc/tandem");
    assert_words(info.note, "only in memory");
}

TD_TEST(a_full_disk_costs_the_cache_alone)
{
    const char *cache = cache_of("full");

    for (int at = 1; at <= 2; at++) {
        td_device *dev = open_jit(quick(), cache);

        full_disk = 1;
        td_assert_ok(attend(dev, &small));
        full_disk = 0;
        assert_words(info_of(dev).note, "No space left on device; the code is only in memory");
        td_assert_ok(attend(dev, &small)); /* from memory */
        assert_int_equal(info_of(dev).compiled, 1);
        td_device_close(dev);
    }
    assert_int_equal(run_with(quick(), cache).compiled, 1); /* nothing is left that looks like code */
    (void)entry_of(cache);
}

TD_TEST(processes_at_once_leave_one_whole_entry)
{
    enum { PROCESSES = 3 };
    const char *cache = cache_of("at-once");
    pid_t children[PROCESSES];

    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            td_device *dev = NULL;
            td_status status = td_device_open("cpu", &dev);

            if (status == TD_OK)
                status = td_jit_configure(dev, &(td_jit_options){.compiler = quick(), .cache = cache});
            if (status == TD_OK)
                status = attend(dev, &small);
            td_device_close(dev);
            _exit(status == TD_OK ? 0 : 1);
        }
    }
    for (int i = 0; i < PROCESSES; i++) {
        int ended = -1;

        assert_int_equal(waitpid(children[i], &ended, 0), children[i]);
        assert_int_equal(ended, 0);
    }
    (void)entry_of(cache);
    assert_int_equal(run_with(quick(), cache).loaded, 1);
}

/* ---- the compiler ---- */

TD_TEST(a_compiler_that_fails_is_an_error_with_its_words)
{
    static const struct {
        const char *name, *does, *words;
    } cases[] = {
        {"fails", "echo 'note: at it'; echo 'code.c:1: error: no'; exit 3",
         "failed (3): code.c:1: error: no"},
        {"silent", "exit 1", "failed (1): it printed nothing"},
        {"killed", "kill -9 $$", "was ended by signal 9"},
        {"idle", "exit 0", "succeeded, but made no file"},
        {"liar", "echo no code > \"$out\"", "cannot be loaded"},
        {"empty", "cp /dev/null \"$out\"", "cannot be loaded"},
        {"other", "echo 'int x;' | cc -shared -o \"$out\" -xc -", "has no td_jit_forward"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_device *dev = open_jit(false_compiler(cases[i].name, cases[i].does), cache_of("failing"));

        td_assert_refused(attend(dev, &small), TD_LIBRARY_ERROR, cases[i].words);
        td_assert_refused(td_jit_prepare(dev, &small), TD_LIBRARY_ERROR, cases[i].words);
        assert_int_equal(info_of(dev).compiled, 0);
        assert_words(info_of(dev).compiler, "of unknown version");
        td_device_close(dev);
    }
}

/* Forward works before that. Each pass is compiled once. */
TD_TEST(a_backward_that_did_not_compile_is_compiled_by_a_later_call)
{
    char script[512], fixed[160];
    td_attend_run *run = td_attend_open(&td_attention_jit, "later", &small);

    snprintf(fixed, sizeof fixed, "%s/fixed", folder);
    snprintf(script, sizeof script,
             "grep -q '^#define BACKWARD 1' \"$2\" && [ ! -f %s ] && echo error: no backward && exit 1\n"
             "exec %s -o \"$out\" \"$@\"",
             fixed, quick());
    td_assert_ok(td_jit_configure(run->dev, &(td_jit_options){.compiler = false_compiler("later", script)}));
    for (int call = 0; call < 2; call++) {
        td_attend_go(run, true);
        td_assert_refused(td_jit_backward(run->dev, &run->shape, run->q, run->k, run->v, run->o, run->dout,
                                          run->saved, run->dq, run->dk, run->dv, run->backward_work),
                          TD_LIBRARY_ERROR, "error: no backward");
        assert_int_equal(info_of(run->dev).compiled, 1);
    }
    write_file(fixed, "", 0600);
    for (int call = 0; call < 2; call++) {
        td_attend_go(run, false);
        assert_int_equal(info_of(run->dev).compiled, 2);
    }
    td_attend_close(run);
}

TD_TEST(a_compiler_that_is_missing_is_an_error)
{
    char plain[128], mute[128];
    const struct {
        const char *name, *words;
    } cases[] = {
        {"no-such-compiler", "no compiler 'no-such-compiler' that can be run in /usr/local/bin, /usr/bin"},
        {"/no/such/compiler", "no compiler '/no/such/compiler' that can be run: jit attention"},
        {plain, "cannot be run: Exec format error"},
        {mute, "does not list its macros"},
        {"false", "failed (1): it printed nothing"},
    };

    snprintf(plain, sizeof plain, "%s/plain", folder);
    write_file(plain, "no program\n", 0700);
    snprintf(mute, sizeof mute, "%s/mute", folder);
    write_file(mute, "#!/bin/sh\nexit 0\n", 0700);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_device *dev = open_jit(cases[i].name, NULL);

        td_assert_refused(attend(dev, &small), TD_LIBRARY_ERROR, cases[i].words);
        /* Another compiler may be named while none was found. */
        td_assert_ok(td_jit_configure(dev, &(td_jit_options){.compiler = quick()}));
        td_assert_ok(attend(dev, &small));
        td_device_close(dev);
    }
}

TD_TEST(another_compiler_is_another_entry)
{
    char first[160];
    const char *cache = cache_of("compilers");

    snprintf(first, sizeof first, "%s",
             false_compiler("first", "exec cc -O1 -shared -fPIC -w -o \"$out\" \"$2\""));
    assert_int_equal(run_with(first, cache).compiled, 1);
    assert_int_equal(run_with(first, cache).loaded, 1);
    assert_int_equal(run_with(NULL, cache).compiled, 1);
    assert_int_equal(run_with(NULL, cache).loaded, 1);
}

/* As ccache does: one program with several links, which behaves as its link's name says. */
TD_TEST(a_compiler_may_be_a_link_to_a_program_of_another_name)
{
    char link[160], program[160];

    snprintf(program, sizeof program, "%s",
             false_compiler("multi",
                            "case \"$self\" in */own-cc) exec cc -O1 -shared -fPIC -w -o \"$out\" \"$2\";; "
                            "esac; echo called as $self; exit 1"));
    snprintf(link, sizeof link, "%s/own-cc", folder);
    assert_int_equal(symlink(program, link), 0);
    assert_int_equal(run_with(link, NULL).compiled, 1);
    assert_int_equal(unlink(link), 0);
}

/* As compilers for processors other than x86. */
TD_TEST(a_compiler_is_asked_which_options_it_takes)
{
    static const char *const refused[] = {"*-mprefer-vector-width*", "*-mprefer-vector-width*|*-march*",
                                          "*-mprefer-vector-width*|*-march*|*-mcpu*"};
    char path[160], text[512];

    snprintf(path, sizeof path, "%s/narrow", folder);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        snprintf(text, sizeof text,
                 "#!/bin/sh\ncase \" $* \" in %s) echo error: unknown option; exit 1;;\n"
                 "*\" -dM \"*) echo '#define __STDC__ 1'; exit 0;; esac\nexec cc \"$@\"\n",
                 refused[i]);
        write_file(path, text, 0700);
        assert_int_equal(run_with(path, NULL).compiled, 1);
    }
}

TD_TEST(a_compiler_works_in_the_folder_that_is_named)
{
    const char *scratch = cache_of("scratch");
    char script[300], long_name[5000];
    td_compiler compiler;
    td_code code = {NULL, 0};

    assert_int_equal(mkdir(scratch, 0700), 0);
    snprintf(script, sizeof script, "case $out in %s/*) exec cc -shared -o \"$out\" \"$2\";; esac; exit 1",
             scratch);
    td_assert_ok(td_compiler_find(false_compiler("in-scratch", script), scratch, &compiler));
    td_assert_ok(td_compiler_build(&compiler, "int td = 1;\n", &code));
    td_code_free(&code);
    td_compiler_deinit(&compiler);
    assert_int_equal(rmdir(scratch), 0); /* the folder is empty */
    td_assert_refused(td_compiler_find("cc", scratch, &compiler), TD_IO_ERROR, "cannot make a folder in '");
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    td_assert_refused(td_compiler_find("cc", long_name, &compiler), TD_IO_ERROR,
                      "cannot make a folder in 'xxx");
}

TD_TEST(a_compiler_needs_disk_space)
{
    td_compiler compiler;
    td_code code = {NULL, 0};

    td_assert_ok(td_compiler_find("cc", NULL, &compiler));
    td_assert_ok(td_compiler_build(&compiler, "int td = 1;\n", &code));
    assert_true(code.bytes > 0);
    td_code_free(&code);
    td_assert_refused(td_compiler_build(&compiler, "no C\n", &code), TD_LIBRARY_ERROR, "error: ");
    assert_null(code.data);
    td_compiler_deinit(&compiler);
    td_assert_refused(td_code_read("/no/such/file", &code), TD_IO_ERROR, "cannot open '/no/such/file'");
    td_assert_refused(td_code_read("/tmp", &code), TD_IO_ERROR, "is not a regular file");
}

/* ---- arguments ---- */

TD_TEST(bad_options_are_refused)
{
    td_device *dev = open_jit(NULL, cache_of("options"));

    td_assert_ok(td_jit_prepare(dev, &small));
    td_assert_refused(td_jit_configure(dev, &(td_jit_options){0}), TD_BAD_STATE,
                      "has its compiler already: call td_jit_configure before");
    td_device_close(dev);
}

TD_TEST(refuses_what_it_has_no_code_for)
{
    td_device *dev = open_jit(NULL, NULL);
    td_attention_sizes sizes;
    td_attention_traits traits;
    td_attention_shape shape = small;

    shape.head_dim = 257;
    td_assert_refused(td_jit_sizes(dev, &shape, &sizes), TD_UNSUPPORTED, "head_dim is 257");
    shape = small, shape.dtype = TD_F16;
    td_assert_refused(td_jit_prepare(dev, &shape), TD_UNSUPPORTED, "dtype is f16");
    shape = small, shape.tf32 = true;
    td_assert_refused(td_jit_prepare(dev, &shape), TD_UNSUPPORTED, "tf32 is set");
    shape = small, shape.seq = ((int64_t)1 << 30) + 1;
    td_assert_refused(td_jit_sizes(dev, &shape, &sizes), TD_UNSUPPORTED, "goes up to 2^30");
    shape.seq = (int64_t)1 << 30, shape.batch = (int64_t)1 << 27, shape.head_dim = 1, shape.heads = 1;

    assert_string_equal(td_attention_jit.name, "jit");
    td_assert_ok(td_attention_jit.describe(TD_DEVICE_CPU, &traits));
    assert_int_equal(traits.saved_floats, 2);
    assert_true(traits.skips_masked && traits.rebuilds_scores && !traits.tf32);
    td_assert_ok(td_jit_describe(TD_DEVICE_CUDA, &traits));
#ifdef TANDEM_HAVE_CUDA
    assert_string_equal(traits.saved, "max_sum");
#else
    assert_string_equal(traits.saved, "scores");
#endif
    td_device_close(dev);
}

typedef struct heard {
    td_listener listener;
    char names[64];
    double flops;
    int open;
} heard;

static void hear_begin(td_listener *listener, const char *label, const td_operation *operation)
{
    heard *const h = (heard *)listener;

    assert_non_null(operation);
    assert_int_equal(operation->op_class, TD_OP_ATTENTION);
    snprintf(h->names + strlen(h->names), sizeof h->names - strlen(h->names), "%s ", label);
    h->flops += operation->flops;
    h->open++;
}

static void hear_end(td_listener *listener)
{
    ((heard *)listener)->open--;
}

TD_TEST(passes_are_heard)
{
    heard h = {.listener = {.begin = hear_begin, .end = hear_end}};
    td_attend_run *run = td_attend_open(&td_attention_jit, "heard", &small);

    td_assert_ok(td_jit_configure(run->dev, &(td_jit_options){.compiler = quick()}));
    td_device_listen(run->dev, &h.listener);
    td_attend_go(run, false);
    td_device_unlisten(run->dev, &h.listener);
    assert_string_equal(h.names, "jit_forward jit_backward ");
    assert_true(h.flops > 2 * 2 * 21 * 21 * 16);
    assert_int_equal(h.open, 0);
    td_attend_close(run);
}

TD_TEST(an_allocation_that_fails_leaves_nothing_half_made)
{
    const char *cache = cache_of("allocations");
    int fails_at = 1;

    for (bool reached = true; reached; fails_at++) {
        td_device *dev;
        td_status status;

        td_assert_ok(td_device_open("cpu", &dev));
        calloc_fails_in = fails_at;
        status = td_jit_configure(dev, &(td_jit_options){.compiler = quick(), .cache = cache});
        if (status == TD_OK)
            status = td_jit_prepare(dev, &small);
        reached = calloc_fails_in == 0;
        calloc_fails_in = 0;
        if (status == TD_OK && reached) /* there was no memory for reading the entry */
            assert_words(info_of(dev).note, "no memory for compiled code; it is compiled again");
        else
            assert_int_equal(status, reached ? TD_NO_MEMORY : TD_OK);
        td_assert_ok(attend(dev, &small));
        td_device_close(dev);
    }
    assert_true(fails_at > 4);
}

/* ---- the shared tests, with one folder for the code ---- */

/** Before the first question for sizes, sets the device's folder, and a compiler with fewer optimizations,
 * which is faster. Forward and backward are unchanged. */
static td_status configured_sizes(td_device *dev, const td_attention_shape *shape, td_attention_sizes *out)
{
    static char light[160];

    if (light[0] == '\0') {
        snprintf(light, sizeof light, "%s/light", folder);
        write_file(light, "#!/bin/sh\nexec cc \"$@\" -O1 -fexpensive-optimizations\n", 0700);
    }
    if (dev)
        (void)td_jit_configure(dev, &(td_jit_options){.compiler = light, .cache = cache_of("shared")});
    return td_jit_sizes(dev, shape, out);
}

static int remove_folder(void **state)
{
    char command[96];

    (void)state;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

int main(void)
{
    const td_attention_impl impl = {.name = "jit",
                                    .describe = td_jit_describe,
                                    .sizes = configured_sizes,
                                    .forward = td_jit_forward,
                                    .backward = td_jit_backward};
    /* As in flash: f32 has sums of some hundred terms. bf16 has one rounding of o, and another rounding in
     * the gradients. */
    const td_attend_subject jit = {&impl, {3e-6, 8e-3}, true, 0, 9};
    if (!mkdtemp(folder))
        return 1;
    const int failed = td_attend_common_tests(&jit);
    return failed + td_run_tests("jit", NULL, remove_folder);
}
