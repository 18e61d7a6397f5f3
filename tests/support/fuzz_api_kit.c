#include "support/fuzz_api_kit.h"

#include "support/guard.h"

#include <unistd.h>

enum { MOST_CALLS = 512, MOST_NOTES = 64, MOST_BLOCKS = 24, BLOCK = 1 << 16 }; /* BLOCK: bytes, at least */

static struct entry {
    const char *name;
    td_status (*call)(void);
    int64_t calls, refused;
} entries[MOST_CALLS];
static int entry_count;

td_device *api_dev;

static struct note {
    td_status status;
    const char *words;
    bool may; /* the call may be refused for this, or may succeed */
} notes[MOST_NOTES];
static int note_count, wrong_percent;

/* A sweep goes through the faults of a case: call number fault_at of wrong() returns true, and bad_below goes
 * through all bad values of this fault. */
static bool sweeping;
static int fault_at, fault_calls;
static int64_t bad_index, bad_count;
static char bad_text[64]; /* the bad value as a message prints it; "": any text */

/* Memory of the case. The guarded blocks live as long as the program. */
static struct area {
    unsigned char *block, *copy;
    unsigned char *start; /* inside block: it ends where block ends */
    size_t bytes, room;   /* bytes of this case, and bytes of the block */
    bool writable;
} areas[MOST_BLOCKS];
static int area_count;

void api_add(const char *name, td_status (*call)(void))
{
    if (entry_count == MOST_CALLS)
        abort();
    entries[entry_count++] = (struct entry){.name = name, .call = call};
}

/* ---- notes ---- */

static void note(td_status status, const char *words, bool may)
{
    assert_in_range(note_count, 0, MOST_NOTES - 1);
    notes[note_count++] = (struct note){status, words, may};
}

void impossible(td_status status, const char *words)
{
    note(status, words, false);
}

void impossible_if(bool condition, const char *words)
{
    if (condition)
        note(TD_BAD_ARGUMENT, words, false);
}

void possible(td_status status, const char *words)
{
    note(status, words, true);
}

bool api_spoilt(void)
{
    for (int i = 0; i < note_count; i++)
        if (!notes[i].may)
            return true;
    return false;
}

static bool is_word_char(char c)
{
    return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Whether `message` contains one of the words as a whole word. */
static bool has_word(const char *message, const char *words)
{
    while (*words) {
        const size_t length = strcspn(words, "|");

        for (const char *at = message; *at; at++)
            if (strncmp(at, words, length) == 0 && (at == message || !is_word_char(at[-1])) &&
                !is_word_char(at[length]))
                return true;
        words += length + (words[length] == '|');
    }
    return false;
}

/* ---- arguments ---- */

bool wrong(void)
{
    return sweeping ? fault_calls++ == fault_at : td_fuzz_chance(wrong_percent);
}

int64_t bad_below(int64_t count)
{
    if (!sweeping)
        return td_fuzz_below(count);
    const int64_t chosen = bad_index / bad_count % count;
    bad_count *= count;
    return chosen;
}

int64_t says_integer(int64_t value)
{
    snprintf(bad_text, sizeof bad_text, "%" PRId64, value);
    return value;
}

size_t says_size(size_t value)
{
    snprintf(bad_text, sizeof bad_text, "%zu", value);
    return value;
}

double says_number(double value)
{
    snprintf(bad_text, sizeof bad_text, "%g", value);
    return value;
}

/* The device of an operation: one without kernels, if the case is such. */
static bool without_kernels, pretend_cuda;

td_device_kind __real_td_device_kind_of(const td_device *device);
td_device_kind __wrap_td_device_kind_of(const td_device *device)
{
    return pretend_cuda ? TD_DEVICE_CUDA : __real_td_device_kind_of(device);
}

td_device *dev(void)
{
    pretend_cuda = without_kernels;
    if (without_kernels)
        note(TD_UNSUPPORTED, "this build has no kernel for it on cuda", false);
    return pointer("dev", api_dev);
}

int64_t bad_extent(const char *words)
{
    static const int64_t bad[] = {
        0, -1, INT64_MIN, INT64_MIN + 1, INT64_MAX, INT64_MAX - 1, INT64_MAX / 2 + 1};

    const int64_t value = BAD(bad);

    note(TD_BAD_ARGUMENT, words, false);
    if (value < 1) /* if the value is larger, the message may name a result that overflows */
        says_integer(value);
    return value;
}

int64_t extent(const char *words)
{
    return wrong() ? bad_extent(words) : 1 + td_fuzz_below(4);
}

int64_t at_least_one(const char *words)
{
    static const int64_t bad[] = {0, -1, INT64_MIN, INT64_MIN + 1};

    if (!wrong())
        return 1 + td_fuzz_below(4);
    note(TD_BAD_ARGUMENT, words, false);
    return BAD_NUMBER(bad);
}

int64_t index_in(const char *name, int64_t most)
{
    static const int64_t bad[] = {-1, INT64_MIN, -2};

    if (!wrong())
        return td_fuzz_below(most + 1);
    note(TD_BAD_ARGUMENT, name, false);
    return BAD_NUMBER(bad);
}

static const int no_enum[] = {-1, 17, INT32_MAX, INT32_MIN, 255};

td_dtype dtype(const char *name)
{
    if (!wrong())
        return td_fuzz_chance(50) ? TD_F32 : TD_BF16;
    if (bad_below(2) == 0) {
        note(TD_UNSUPPORTED, name, false);
        return bad_below(2) == 0 ? TD_F16 : TD_F64;
    }
    note(TD_BAD_ARGUMENT, name, false);
    return (td_dtype)BAD_NUMBER(no_enum);
}

td_dtype dtype_any(const char *name)
{
    return (td_dtype)choice(name, 4);
}

int choice(const char *name, int count)
{
    if (!wrong())
        return (int)td_fuzz_below(count);
    note(TD_BAD_ARGUMENT, name, false);
    return (int)BAD_NUMBER(no_enum);
}

td_dtype second(const char *name, td_dtype first, bool wide)
{
    const td_dtype other = wide ? TD_F32 : TD_BF16;
    const bool differs = first == (wide ? TD_BF16 : TD_F32);

    if (!wrong())
        return td_fuzz_chance(40) ? (td_dtype)0 : td_fuzz_chance(50) || !differs ? first : other;
    if (differs || bad_below(2) == 0) {
        impossible(TD_BAD_ARGUMENT, name);
        return (td_dtype)17;
    }
    impossible(TD_BAD_ARGUMENT, name);
    impossible(TD_UNSUPPORTED, name);
    return wide && first == TD_F32 ? TD_BF16 : wide ? TD_F16 : first == TD_BF16 ? TD_F32 : TD_F16;
}

td_dtype one_of(td_dtype second, td_dtype first)
{
    return second ? second : first;
}

int any_enum(int count)
{
    return td_fuzz_chance(50) ? (int)td_fuzz_below(count) : TD_FUZZ_PICK(no_enum);
}

void check_name(const char *name, const char *want)
{
    if (want || (name && strncmp(name, "unknown", 7) != 0))
        assert_string_equal(name ? name : "no name", want ? want : "no name");
}

double number(const char *name)
{
    static const double good[] = {0,   1, -1, -0.0, 0.5, 1e-45, -1e-40, (double)FLT_MAX, -(double)FLT_MAX,
                                  1e-3};
    static const double bad[] = {NAN, INFINITY, -INFINITY};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    note(TD_BAD_ARGUMENT, name, false);
    return BAD_NUMBER(bad);
}

double positive(const char *name)
{
    static const double good[] = {1, 0.5, 1e-5, 1e5, 3};
    static const double bad[] = {0, -1, NAN, INFINITY, -INFINITY, -0.0, -0x1p-149};

    if (!wrong())
        return TD_FUZZ_PICK(good);
    note(TD_BAD_ARGUMENT, name, false);
    return BAD_NUMBER(bad);
}

static void *area_of(size_t bytes, const void *from, int fill, bool writable, size_t alignment)
{
    assert_in_range(area_count, 0, MOST_BLOCKS - 1);
    struct area *a = &areas[area_count++];

    if (a->room < bytes + alignment) {
        td_guard_free(a->block);
        free(a->copy);
        a->room = (bytes / BLOCK + 1) * BLOCK;
        a->block = td_guard_alloc(a->room, true, 1, 0);
        a->copy = malloc(a->room);
        assert_non_null(a->copy);
    }
    a->start = a->block + a->room - (bytes + alignment - 1) / alignment * alignment;
    a->bytes = bytes;
    a->writable = writable;
    if (from)
        memcpy(a->start, from, bytes);
    else
        memset(a->start, fill, bytes);
    memcpy(a->copy, a->start, bytes);
    return a->start;
}

/* 0x3F bytes are 0.75 as f32 and bf16, 0xFF bytes NaN. */
const void *in(const char *name, size_t bytes)
{
    return pointer(name, area_of(bytes, NULL, 0x3F, false, 1));
}

void *out(const char *name, size_t bytes)
{
    return pointer(name, area_of(bytes, NULL, 0xFF, true, 1));
}

void *in_out(const char *name, size_t bytes)
{
    return pointer(name, area_of(bytes, NULL, 0x3F, true, 1));
}

void *out_or_null(size_t bytes)
{
    return td_fuzz_chance(30) ? NULL : area_of(bytes, NULL, 0xFF, true, 1);
}

const void *in_copy(const char *name, const void *from, size_t bytes)
{
    return pointer(name, area_of(bytes, from, 0, false, 8));
}

void *in_out_copy(const char *name, const void *from, size_t bytes)
{
    return pointer(name, area_of(bytes, from, 0, true, 8));
}

void *work(td_status status, const size_t *bytes)
{
    td_forget_error();
    if (status == TD_OK && *bytes == 0 && td_fuzz_chance(50))
        return NULL;
    if ((status != TD_OK || *bytes > 0) && wrong()) {
        note(TD_BAD_ARGUMENT, "work", false);
        return NULL;
    }
    char *const area = area_of(status == TD_OK ? *bytes : 4096, NULL, 0xFF, true, 256);
    if ((status == TD_OK && *bytes == 0) || !wrong())
        return area;
    note(TD_BAD_ARGUMENT, "work", false);
    return area + (1 << bad_below(8));
}

const int64_t *indices(const char *name, int64_t count, int64_t bound)
{
    int64_t ids[64] = {0};

    assert_in_range(count, 0, 64);
    for (int64_t i = 0; i < count; i++)
        ids[i] = bound > 0 && bound < 64 ? td_fuzz_below(bound) : 0;
    if (count > 0 && wrong()) {
        static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX};

        ids[td_fuzz_below(count)] = bound > 0 && bad_below(2) == 0 ? bound : BAD(bad);
        note(TD_BAD_ARGUMENT, name, false);
    }
    return pointer(name, area_of((size_t)count * sizeof *ids, ids, 0, false, 8));
}

int64_t pitch(const char *name, int64_t row)
{
    const int64_t bad[] = {-1, INT64_MIN, row > 1 && !api_spoilt() ? row - 1 : -2, INT64_MAX};

    if (!wrong())
        return td_fuzz_chance(50) || api_spoilt() ? 0 : row + td_fuzz_below(3);
    impossible(TD_BAD_ARGUMENT, name);
    return BAD(bad);
}

int64_t small(int64_t extent)
{
    return extent >= 1 && extent <= 4 ? extent : 4;
}

int64_t draw_count(void)
{
    static const int64_t bad[] = {0, -1, INT64_MIN};

    if (!wrong())
        return 1 + td_fuzz_below(20);
    impossible(TD_BAD_ARGUMENT, "count");
    return BAD_NUMBER(bad);
}

const double *draw_samples(const char *name, int64_t count)
{
    static const double values[] = {0, 1, -1, NAN, INFINITY, -INFINITY, 1e308, -1e308, 5e-324};
    double samples[20];

    for (int i = 0; i < 20; i++)
        samples[i] = TD_FUZZ_PICK(values);
    return in_copy(name, samples, (size_t)(count >= 1 && count <= 20 ? count : 20) * sizeof *samples);
}

const char *text(const char *name, int count, const char *const *good)
{
    static const char *const bad[] = {NULL,       "",     "no such name",
                                      "\xff\xfe", "%s%n", "cuda:99999999999999999999"};

    if (!wrong())
        return good[td_fuzz_below(count)];
    note(TD_BAD_ARGUMENT, name, false);
    return BAD(bad);
}

static char own_path[] = "/tmp/tandem-fuzz-XXXXXX";

const char *path_own(bool there)
{
    strcpy(own_path + strlen(own_path) - 6, "XXXXXX");
    const int descriptor = mkstemp(own_path);
    assert_true(descriptor >= 0);
    close(descriptor);
    if (!there)
        unlink(own_path);
    return own_path;
}

const char *path_or_none(const char *path)
{
    static const char *const bad[] = {NULL, "", "/", "/no/such/folder/file", "/dev/full", "/dev/full/x"};

    if (!wrong())
        return path;
    const char *const chosen = BAD(bad);
    if (chosen && *chosen)
        note(TD_IO_ERROR, "cannot", false);
    else
        note(TD_BAD_ARGUMENT, "path", false);
    return chosen;
}

td_status path_done(td_status status)
{
    unlink(own_path);
    return status;
}

size_t bytes_of(td_dtype type, int count, const int64_t *extents)
{
    size_t bytes = td_dtype_size(type);

    for (int i = 0; i < count; i++)
        bytes = extents[i] >= 0 && extents[i] <= 4096 ? bytes * (size_t)extents[i] : 0;
    return bytes > 0 && bytes <= 1 << 20 ? bytes : 4096;
}

/* ---- the driver ---- */

static void check_areas(const char *name, bool refused)
{
    for (int i = 0; i < area_count; i++)
        if ((refused || !areas[i].writable) && memcmp(areas[i].start, areas[i].copy, areas[i].bytes) != 0)
            fail_msg("%s %s: argument %d of its memory was written", name, refused ? "refused" : "succeeded",
                     i);
}

/* A refusal of an argument contains one of these words. */
#define DEMANDS "needs|need|NULL|beyond|no|not|cannot|but|beside|without|more|longer|empty|twice"

static void check_status(const char *name, td_status status)
{
    const char *message = td_last_error();

    if (status == TD_OK) {
        for (int i = 0; i < note_count; i++)
            if (!notes[i].may)
                fail_msg("%s returned TD_OK, with an impossible '%s'", name, notes[i].words);
        return;
    }
    for (int i = 0; i < note_count; i++)
        if (notes[i].status == status && has_word(message, notes[i].words)) {
            if (note_count == 1 && !strstr(message, bad_text))
                fail_msg("%s: '%s' lacks the bad value, %s", name, message, bad_text);
            if (sweeping && note_count == 1 && status == TD_BAD_ARGUMENT && !has_word(message, DEMANDS))
                fail_msg("%s: '%s' does not say what is wrong", name, message);
            return;
        }
    char expected[512] = "";
    for (int i = 0; i < note_count && strlen(expected) < 400; i++)
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), " %s '%s'",
                 td_status_name(notes[i].status), notes[i].words);
    fail_msg("%s returned %s, '%s'; expected was%s", name, td_status_name(status), message,
             note_count ? expected : " TD_OK");
}

void api_begin(void)
{
    static const int percents[] = {0, 3, 15, 40};

    note_count = area_count = 0;
    bad_text[0] = 0;
    wrong_percent = TD_FUZZ_PICK(percents);
    td_forget_error();
}

void api_judge(const char *name, td_status status)
{
    check_status(name, status);
    check_areas(name, status != TD_OK);
}

/* Judges one call of a function. */
static void call_entry(struct entry *e)
{
    td_memory_stats before, after;

    td_assert_ok(td_device_open("cpu", &api_dev));
    td_assert_ok(td_device_memory(api_dev, &before));
    api_begin();
    const td_status status = e->call();
    pretend_cuda = false;
    e->calls++;
    e->refused += status != TD_OK;
    api_judge(e->name, status);
    td_assert_ok(td_device_memory(api_dev, &after));
    assert_int_equal(after.live_blocks, before.live_blocks);
    td_device_close(api_dev);
    api_dev = NULL;
}

void api_case(void)
{
    struct entry *e = &entries[td_fuzz_below(entry_count)];

    td_fuzz_describe("%s", e->name);
    call_entry(e);
}

static void call_with_fault(struct entry *e, uint64_t seed, int fault, int64_t bad)
{
    td_fuzz_describe("%s, seed %" PRIu64 ", fault %d, bad value %" PRId64, e->name, seed, fault, bad);
    td_fuzz_seed(seed);
    fault_at = fault;
    fault_calls = 0;
    bad_index = bad;
    bad_count = 1;
    call_entry(e);
}

void api_gap(const char *name)
{
    int found = 0;

    sweeping = without_kernels = true;
    for (int i = 0; i < entry_count; i++)
        if (strcmp(entries[i].name, name) == 0) {
            char said[64] = "";

            call_with_fault(&entries[i], 1, -1, 0);
            assert_int_equal(sscanf(td_last_error(), "%63[a-z_]:", said), 1);
            assert_non_null(strstr(name, said)); /* the message names the operation */
            found++;
        }
    sweeping = without_kernels = false;
    assert_int_equal(found, 1);
}

void api_sweep(const char *prefix)
{
    sweeping = true;
    for (int i = 0; i < entry_count; i++)
        for (uint64_t seed = 1; seed <= 4 && strncmp(entries[i].name, prefix, strlen(prefix)) == 0; seed++) {
            call_with_fault(&entries[i], seed, -1, 0);
            const int faults = fault_calls;
            for (int fault = 0; fault < faults; fault++) {
                int64_t most = 1;

                for (int64_t bad = 0; bad < most; bad++) {
                    call_with_fault(&entries[i], seed, fault, bad);
                    most = bad_count > most ? bad_count : most;
                }
            }
        }
    sweeping = false;
}

int api_sweep_teardown(void **state)
{
    (void)state;
    if (sweeping)
        print_error("%s\n", td_fuzz_description());
    sweeping = false;
    return 0;
}

void api_list(void)
{
    for (int i = 0; i < entry_count; i++)
        printf("%s\n", entries[i].name);
}

void api_summary(void)
{
    int64_t calls = 0, refused = 0;

    for (int i = 0; i < entry_count; i++) {
        calls += entries[i].calls;
        refused += entries[i].refused;
    }
    print_message("    %d functions, %" PRId64 " calls, %" PRId64 " refused\n", entry_count, calls, refused);
}
