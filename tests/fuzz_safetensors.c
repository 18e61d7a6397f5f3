/* Hostile safetensors files: random changes of the bytes and the structure of good files. If a file is
 * refused, there is a reason and nothing changes. If it is accepted, its parts are consistent, and the
 * trainer has its numbers. support/fuzz.h says how to run one case again. */
#include "base/safetensors.h"

#include "support/compare.h"
#include "support/file_kit.h"
#include "support/fuzz.h"
#include "support/test.h"
#include "support/weights.h"
#include "train/train.h"

#include <unistd.h>

static int arguments;
static char **argument;

/* ---- trainers, and a good file of each ---- */

typedef struct source {
    td_train *train;
    char *bytes; /* the bytes of its file */
    size_t count;
    int64_t steps;
    td_weights weights;
    char *params; /* copies of weights and moments */
    float *moments[2];
    char *copies;
} source;

enum { KINDS = 4 };
static td_device *dev;
static source sources[KINDS];

static void *copy_of(const void *from, size_t bytes)
{
    void *copy = malloc(bytes);

    assert_non_null(copy);
    return memcpy(copy, from, bytes);
}

static void make_source(source *s, td_precision precision, td_optimizer_kind kind, uint64_t seed)
{
    static const int64_t ids[] = {0, 1, 2, 3, 4, 1};
    const td_train_config config = {
        .model = {.size = {.d_model = 4, .d_ff = 6, .layers = 1, .heads = 2, .vocab = 5},
                  .batch = 2,
                  .context = 3,
                  .precision = precision,
                  .attention = "flash"},
        .hyper = {.kind = kind, .adamw = td_adamw_defaults(TD_ADAMW_TORCH), .sgd.lr = 0.1}};
    float *moments[2];

    td_assert_ok(td_train_create(dev, &config, &s->train));
    td_assert_ok(td_train_init(s->train, seed));
    for (uint64_t i = 0; i < seed; i++)
        td_assert_ok(td_train_step(s->train, ids, ids, 2, 3));
    td_assert_ok(td_train_save(s->train, file_path));
    s->bytes = file_read(file_path, &s->count);
    s->steps = (int64_t)seed;
    td_assert_ok(td_transformer_weights(td_train_model(s->train), &s->weights));
    s->params = copy_of(s->weights.params, (size_t)s->weights.elements * td_dtype_size(s->weights.dtype));
    td_assert_ok(td_optimizer_moments(td_train_optimizer(s->train), 0, &moments[0], &moments[1]));
    for (int i = 0; i < 2 && moments[i]; i++)
        s->moments[i] = copy_of(moments[i], (size_t)s->weights.elements * sizeof(float));
}

static void assert_unchanged(const source *s)
{
    const td_weights *w = &s->weights;
    float *moments[2];
    int64_t steps;

    td_assert_identical("weights", w->dtype, w->params, s->params, w->elements);
    td_assert_ok(td_optimizer_moments(td_train_optimizer(s->train), 0, &moments[0], &moments[1]));
    for (int i = 0; i < 2 && moments[i]; i++)
        td_assert_identical("moments", TD_F32, moments[i], s->moments[i], w->elements);
    td_assert_ok(td_train_steps(s->train, &steps));
    assert_int_equal(steps, s->steps);
}

/* ---- changes ---- */

enum { ROOM = 1 << 17 };
static char bytes[ROOM];
static size_t count;

static size_t header_length(void)
{
    size_t length = 0;

    for (int i = 7; i >= 0; i--)
        length = length << 8 | (unsigned char)bytes[i];
    return length;
}

static void set_header_length(uint64_t length)
{
    for (int i = 0; i < 8; i++)
        bytes[i] = (char)(length >> 8 * i);
}

/* Returns the end of the header, or of the file if that comes first. */
static size_t header_end(void)
{
    const size_t length = count >= 8 ? header_length() : 0;

    return count < 8 ? count : length < count - 8 ? 8 + length : count;
}

/* Replaces `old` bytes at `at` by text. Mostly it also corrects the header's length. */
static void replace(size_t at, size_t old, const char *with, size_t length)
{
    const bool inside = count >= 8 && at >= 8 && at + old <= header_end() && td_fuzz_chance(90);

    if (at + old > count || count - old + length > ROOM)
        return;
    if (inside)
        set_header_length(header_length() - old + length);
    memmove(bytes + at + length, bytes + at + old, count - at - old);
    memcpy(bytes + at, with, length);
    count = count - old + length;
}

static size_t below(size_t bound)
{
    return bound > 0 ? (size_t)td_fuzz_below((int64_t)bound) : 0;
}

/* Returns a place of `mark` in the header, or any place. */
static size_t place_of(char mark)
{
    const size_t end = header_end(), begin = end > 8 ? 8 : 0;
    const size_t from = begin + below(end - begin);

    for (size_t i = from; i < end; i++)
        if (bytes[i] == mark)
            return i;
    return from;
}

static void change_bytes(void)
{
    const size_t end = td_fuzz_chance(70) ? header_end() : count;

    for (int64_t n = 1 + td_fuzz_below(4); n > 0 && end > 0; n--)
        bytes[below(end)] =
            (char)(td_fuzz_chance(50) ? td_fuzz_bits() : (uint64_t) "{}[]\",:\\0 u"[below(11)]);
}

static void change_number(void)
{
    static const char *const numbers[] = {"0",  "1",    "-1",   "4",  "8",   "9223372036854775807",
                                          "00", "1e3",  "24.0", "16", "00x", "9223372036854775808",
                                          "",   "null", "[]",   "2",  "32",  "99999999999999999999999"};
    const size_t end = header_end();
    size_t at = place_of('[') + 1, digits = 0;
    const char *with = TD_FUZZ_PICK(numbers);

    while (at + digits < end && bytes[at + digits] >= '0' && bytes[at + digits] <= '9')
        digits++;
    replace(at < count ? at : count, digits, with, strlen(with));
}

static void change_dtype(void)
{
    static const char *const dtypes[] = {"F32", "F16", "BF16", "F64", "I64", "I32",
                                         "U8",  "F4",  "",     "f32", "C64", "BOOL"};
    const size_t end = header_end();
    const char *with = TD_FUZZ_PICK(dtypes);

    for (size_t at = place_of('d'); at + 13 < end; at++)
        if (memcmp(bytes + at, "dtype\":\"", 8) == 0) {
            const char *quote = memchr(bytes + at + 8, '"', end - at - 8);

            if (quote)
                replace(at + 8, (size_t)(quote - bytes) - at - 8, with, strlen(with));
            return;
        }
}

static void insert_text(void)
{
    static const char *const texts[] = {
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "\\u0000",
        "\\ud83d\\ude00",
        "\\ud83d",
        "\\u00e9",
        "\xff",
        "\xc3\xa9",
        " ",
        "\n",
        "[[[[[[[[[[[[[[[[",
        "\"__metadata__\":{},",
        "\"optimizer\":\"sgd\",",
        "\"dtype\":\"F32\",",
        "\"x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "\"optimizer.x\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},",
        "\"optimizer.step\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},",
    };
    static const char marks[] = "{}[]\",:\"";
    const char *with = TD_FUZZ_PICK(texts);

    replace(place_of(marks[below(sizeof marks - 1)]) + below(2), 0, with, strlen(with));
}

/* Repeats, removes or moves a part of the header, mostly from one mark to another. */
static void move_stretch(void)
{
    char stretch[512];
    const size_t at = place_of("\"{,"[below(3)]), end = header_end();
    size_t length = 1 + below(sizeof stretch - 1);
    const char *close = at < end ? memchr(bytes + at, '}', end - at) : NULL;

    if (close && td_fuzz_chance(80) && (size_t)(close - bytes) - at + 2 < sizeof stretch)
        length = (size_t)(close - bytes) - at + 1 + below(2);
    if (at + length > count)
        return;
    memcpy(stretch, bytes + at, length);
    if (td_fuzz_chance(60))
        replace(at, length, "", 0);
    if (td_fuzz_chance(60))
        replace(place_of(','), 0, stretch, length);
}

static void change_length(void)
{
    static const uint64_t lengths[] = {0, 1, 2, 100000000, 100000001, INT64_MAX, UINT64_MAX, UINT64_MAX - 7};

    if (count >= 8)
        set_header_length(td_fuzz_chance(50) ? TD_FUZZ_PICK(lengths)
                                             : header_length() + (uint64_t)(td_fuzz_below(17) - 8));
}

static void change_end(void)
{
    if (td_fuzz_chance(50))
        count = below(count + 1);
    else
        for (int64_t n = 1 + td_fuzz_below(16); n > 0 && count < ROOM; n--)
            bytes[count++] = (char)td_fuzz_bits();
}

/* Changes that leave a good file of another model: another name, or a transposed shape. */
static void change_name(void)
{
    const size_t at = place_of('.') + 1;

    if (at < header_end())
        bytes[at] = "abelmnopqstvw0123._\""[below(20)];
}

static void turn_shape(void)
{
    const size_t end = header_end(), at = place_of('[') + 1;

    if (at + 3 < end && bytes[at + 1] == ',' && bytes[at + 3] == ']') {
        const char first = bytes[at];

        bytes[at] = bytes[at + 2];
        bytes[at + 2] = first;
    }
}

/* Changes only numbers, so that the file is accepted. */
static void change_data(void)
{
    const size_t begin = header_end();

    for (int64_t n = td_fuzz_below(20); n > 0 && begin < count; n--)
        bytes[begin + below(count - begin)] = (char)td_fuzz_bits();
}

static void change(void)
{
    static void (*const changes[])(void) = {
        change_bytes, change_number, change_dtype, insert_text, move_stretch,  change_name, change_name,
        turn_shape,   turn_shape,    change_data,  change_data, change_length, change_end};

    for (int64_t n = 1 + td_fuzz_below(2); n > 0; n--)
        TD_FUZZ_PICK(changes)();
}

/* ---- checks ---- */

static void assert_says_why(td_status status)
{
    if (status != TD_BAD_ARGUMENT && status != TD_UNSUPPORTED)
        fail_msg("refused with %s: %s", td_status_name(status), td_last_error());
    if (!strstr(td_last_error(), file_path))
        fail_msg("the message does not name the file: %s", td_last_error());
}

/* If the file opens, its parts must be consistent. */
static bool check_file(void)
{
    td_safetensors *file = (td_safetensors *)sources;
    const char *last = NULL;
    int64_t total = 0;
    td_stored t;

    td_forget_error();
    const td_status status = td_safetensors_open(file_path, &file);
    if (status != TD_OK) {
        assert_null(file);
        assert_says_why(status);
        return false;
    }
    for (int64_t i = 0; i < td_safetensors_count(file); i++) {
        td_assert_ok(td_safetensors_tensor(file, i, &t));
        assert_true(!last || strcmp(last, t.name) < 0);
        assert_int_equal(td_safetensors_find(file, t.name), i);
        assert_true(t.rank >= 0 && t.rank <= TD_STORED_MOST_RANK && t.bytes >= 0);
        char *data = malloc((size_t)t.bytes + 1);
        assert_non_null(data);
        const td_status got = td_safetensors_read(file, i, 0, t.bytes, data);
        if (got != TD_OK) { /* the dtype is unknown */
            assert_int_equal(got, TD_UNSUPPORTED);
            assert_says_why(got);
        }
        free(data);
        last = t.name;
        total += t.bytes;
    }
    assert_int_equal(total, count - header_end());
    td_safetensors_close(file);
    return true;
}

/* Fails unless the weights are the file's, converted. */
static void assert_weights_of_file(const source *s)
{
    td_safetensors *file;
    td_parameter p;
    td_stored t;

    td_assert_ok(td_safetensors_open(file_path, &file));
    for (int64_t i = 0; i < td_transformer_parameter_count(td_train_model(s->train)); i++) {
        td_assert_ok(td_transformer_parameter(td_train_model(s->train), i, &p));
        const int64_t index = td_safetensors_find(file, p.name);
        td_assert_ok(td_safetensors_tensor(file, index, &t));
        const td_dtype from = t.bytes == 4 * p.numel         ? TD_F32
                              : strcmp(t.dtype, "BF16") == 0 ? TD_BF16
                                                             : TD_F16;
        char *data = malloc((size_t)t.bytes), *want = malloc((size_t)p.numel * 4);
        assert_true(data && want);
        td_assert_ok(td_safetensors_read(file, index, 0, t.bytes, data));
        td_assert_ok(td_convert(p.numel, from, data, p.dtype, want));
        if (!p.data) { /* planes lose the payload of a NaN */
            uint16_t *planes = malloc((size_t)p.numel * 4);
            assert_non_null(planes);
            td_planes_split(p.numel, (float *)(void *)want, planes, planes + p.numel);
            td_planes_join(p.numel, planes, planes + p.numel, (float *)(void *)want);
            free(planes);
        }
        void *numbers = td_numbers_of(td_train_model(s->train), i);
        td_assert_identical(p.name, p.dtype, numbers, want, p.numel);
        free(numbers);
        free(data);
        free(want);
    }
    td_safetensors_close(file);
}

TD_BODY(hostile_files_are_refused_or_hold_together)
{
    int64_t opened = 0, taken = 0, refused = 0;

    td_assert_ok(td_cpu_set_threads(1));
    td_assert_ok(td_device_open("cpu", &dev));
    make_source(&sources[0], TD_PRECISION_F32, TD_OPTIMIZER_ADAMW, 1);
    make_source(&sources[1], TD_PRECISION_BF16_MIXED, TD_OPTIMIZER_ADAMW, 2);
    make_source(&sources[2], TD_PRECISION_BF16, TD_OPTIMIZER_ADAMW, 3);
    make_source(&sources[3], TD_PRECISION_F32, TD_OPTIMIZER_SGD, 4);
    td_fuzz_begin(arguments, argument);
    while (td_fuzz_next()) {
        const int from = (int)td_fuzz_below(KINDS),
                  to = td_fuzz_chance(80) ? from : (int)td_fuzz_below(KINDS);
        const bool weights = td_fuzz_chance(30);
        const source *s = &sources[to];

        td_fuzz_describe("a file of trainer %d, changed, for %s %d", from,
                         weights ? "the model of" : "trainer", to);
        count = sources[from].count;
        memcpy(bytes, sources[from].bytes, count);
        change();
        file_write(file_path, bytes, count);
        const bool opens = check_file();
        td_forget_error();
        const td_status status = weights ? td_transformer_load(td_train_model(s->train), file_path)
                                         : td_train_restore(s->train, file_path);
        opened += opens;
        if (status != TD_OK) {
            assert_says_why(status);
            assert_unchanged(s);
            refused++;
            continue;
        }
        assert_true(opens);
        assert_weights_of_file(s);
        taken++;
        file_write(file_path, s->bytes, s->count);
        td_assert_ok(td_train_restore(s->train, file_path));
        assert_unchanged(s);
    }
    printf("    %lld cases: %lld files open, %lld taken, %lld refused\n", (long long)td_fuzz_cases(),
           (long long)opened, (long long)taken, (long long)refused);
    if (td_fuzz_cases() > 1000) /* if changes broke all files or none, they would test nothing */
        assert_true(opened > taken && taken * 50 > td_fuzz_cases() && refused * 5 > td_fuzz_cases());
    for (int i = 0; i < KINDS; i++) {
        td_train_destroy(sources[i].train);
        free(sources[i].bytes);
        free(sources[i].params);
        free(sources[i].moments[0]);
        free(sources[i].moments[1]);
    }
    td_device_close(dev);
}

static int remove_all(void **state)
{
    const int printed = td_fuzz_teardown(state);

    return file_folder_remove(state) == 0 ? printed : -1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(hostile_files_are_refused_or_hold_together, file_folder_make,
                                        remove_all),
    };

    arguments = argc;
    argument = argv;
    return cmocka_run_group_tests_name("fuzz_safetensors", tests, NULL, NULL);
}
