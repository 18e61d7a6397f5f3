/** What the files of test_fuzz_api share: how a call of a public function is drawn, and what is asked of it.
 *
 * To cover a function, write `API(td_name) { ... }` in the file of its module: draw each argument by the name
 * that the function's messages call it, and return the call's status. A drawn argument that cannot be right
 * notes so itself; what only a combination makes wrong is noted with impossible_if. Then
 *
 *   - with nothing noted the call must return TD_OK; else a status that was noted, with a message that has
 *     one of the words that were noted with it;
 *   - arguments that are only read keep their bits, and after a refusal so do all others, and the device's
 *     account. */
#ifndef TD_TESTS_FUZZ_API_KIT_H
#define TD_TESTS_FUZZ_API_KIT_H

#include "device/device.h"
#include "support/compare.h"
#include "support/fuzz.h"
#include "support/test.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>

#define API(function)                                                                                        \
    static td_status call_##function(void);                                                                  \
    __attribute__((constructor)) static void add_##function(void)                                            \
    {                                                                                                        \
        api_add(#function, call_##function);                                                                 \
    }                                                                                                        \
    static td_status call_##function(void)

/* A function that takes a NULL and returns nothing. */
#define API_OF_NULL(function)                                                                                \
    API(function)                                                                                            \
    {                                                                                                        \
        function(NULL);                                                                                      \
        return TD_OK;                                                                                        \
    }

/* The names of an enum's values 0, 1, ...; and the function that finds a value by its name. */
#define API_NAMES(type, function, ...)                                                                       \
    API(function)                                                                                            \
    {                                                                                                        \
        static const char *const names[] = {__VA_ARGS__};                                                    \
        enum { COUNT = sizeof names / sizeof *names };                                                       \
                                                                                                             \
        for (int value = -1; value <= COUNT; value++)                                                        \
            check_name(function((type)value), value >= 0 && value < COUNT ? names[value] : NULL);            \
        return TD_OK;                                                                                        \
    }
#define API_PARSE(type, function, words, ...)                                                                \
    API(function)                                                                                            \
    {                                                                                                        \
        static const char *const names[] = {__VA_ARGS__};                                                    \
        const char *const name = text(words, sizeof names / sizeof *names, names);                           \
        type *const to = out("out", sizeof(type));                                                           \
        const td_status status = function(name, to);                                                         \
                                                                                                             \
        if (status == TD_OK)                                                                                 \
            assert_string_equal(names[*to], name);                                                           \
        return status;                                                                                       \
    }

/* Destroys what a call made at `to`, if it was not NULL; a refused call has set it to NULL. */
#define API_MADE(status, to, made, destroy)                                                                  \
    do {                                                                                                     \
        if ((to) && (status) != TD_OK)                                                                       \
            assert_null(made);                                                                               \
        if (to)                                                                                              \
            destroy(made);                                                                                   \
    } while (0)

void api_add(const char *name, td_status (*call)(void));

/* A CPU device of the case's own. */
extern td_device *api_dev;

/* ---- notes: `words` are the words of a message, divided by '|' ---- */

void impossible(td_status status, const char *words);
void impossible_if(bool condition, const char *words); /* TD_BAD_ARGUMENT */

/* The call may be refused so, or may not. */
void possible(td_status status, const char *words);

/* Whether anything is noted as impossible so far. */
bool api_spoilt(void);

/* ---- arguments ---- */

/* Whether the next argument is to be wrong: as often as the case has drawn; in a sweep exactly one is. */
bool wrong(void);

/* Which of `count` bad values a wrong argument has, and this value of an array. */
int64_t bad_below(int64_t count);
#define BAD(array) ((array)[bad_below(sizeof(array) / sizeof *(array))])

/* The same of numbers, which the message must then print, if nothing else is wrong. */
#define BAD_NUMBER(array)                                                                                    \
    _Generic((array)[0], float                                                                               \
             : says_number, double                                                                           \
             : says_number, size_t                                                                           \
             : says_size, default                                                                            \
             : says_integer)(BAD(array))
int64_t says_integer(int64_t value);
size_t says_size(size_t value);
double says_number(double value);

/* Spoils a variable with one of the values that follow, if it is to be wrong: a message must then have one of
 * the words. */
#define SPOIL_WITH(pick, variable, words, ...)                                                               \
    do {                                                                                                     \
        if (wrong()) {                                                                                       \
            const __typeof__(variable) bad_values[] = {__VA_ARGS__};                                         \
                                                                                                             \
            (variable) = pick(bad_values);                                                                   \
            impossible(TD_BAD_ARGUMENT, words);                                                              \
        }                                                                                                    \
    } while (0)
#define SPOIL(variable, words, ...)        SPOIL_WITH(BAD, variable, words, __VA_ARGS__)
#define SPOIL_NUMBER(variable, words, ...) SPOIL_WITH(BAD_NUMBER, variable, words, __VA_ARGS__)

td_device *dev(void);

/* In [1, 4]; or 0, negative, or next to the largest number, where `words` beside the name are those of
 * products. */
int64_t extent(const char *words);
int64_t bad_extent(const char *words);
int64_t at_least_one(const char *words); /* without the largest */

/* In [0, most]; or negative. */
int64_t index_in(const char *name, int64_t most);

/* f32 or bf16; or a type that the CPU has no kernels for, or none at all. dtype_any takes all four types. */
td_dtype dtype(const char *name);
td_dtype dtype_any(const char *name);

/* A second type: 0, `first`, f32 beside a 16-bit one (`wide`) or a 16-bit one beside f32; or another. one_of
 * says which type that is. */
td_dtype second(const char *name, td_dtype first, bool wide);
td_dtype one_of(td_dtype second, td_dtype first);

/* A value in [0, count); or another. */
int choice(const char *name, int count);

/* The same for functions that cannot refuse. */
int any_enum(int count);

/* Fails unless a value's name is `want`; NULL: that there is none, or "unknown ...". */
void check_name(const char *name, const char *want);

/* Any finite number that f32 can hold; or NaN or an infinity. `positive` ones are above 0. */
double number(const char *name);
double positive(const char *name);

/* A struct; or NULL. */
#define pointer(name, address) (wrong() ? (impossible(TD_BAD_ARGUMENT, (name)), NULL) : (address))

/* Memory of `bytes` that ends at an inaccessible page, or NULL: read only, written only, or both. */
const void *in(const char *name, size_t bytes);
void *out(const char *name, size_t bytes);
void *in_out(const char *name, size_t bytes);

/* The same, where NULL is allowed. */
void *out_or_null(size_t bytes);

/* A work area of the size that `bytes` holds, if `status` says that it does; or NULL, or out of line. */
void *work(td_status status, const size_t *bytes);

/* [count] indices in [0, bound), or one that is not. */
const int64_t *indices(const char *name, int64_t count, int64_t bound);

/* A count in [1, 20], or none; and as many numbers of any sort. */
int64_t draw_count(void);
const double *draw_samples(const char *name, int64_t count);

/* A copy of a struct that the call only reads, or also writes. */
const void *in_copy(const char *name, const void *from, size_t bytes);
void *in_out_copy(const char *name, const void *from, size_t bytes);

/* One of `count` strings; or NULL, "" or another. */
const char *text(const char *name, int count, const char *const *good);

/* The path of a file of the case's own, empty or yet to be made, which path_done removes and passes `status`
 * on; and that path, or one that is none. */
const char *path_own(bool there);
const char *path_or_none(const char *path);
td_status path_done(td_status status);

/* The bytes of an array, if its extents are small; else 4096. */
size_t bytes_of(td_dtype type, int count, const int64_t *extents);
#define BYTES(type, ...)                                                                                     \
    bytes_of((type), (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)),                              \
             (const int64_t[]){__VA_ARGS__})

/* ---- the driver ---- */

/* Draws a function, calls it and judges. */
void api_case(void);

/* Calls each function whose name begins with `prefix`: four cases without a fault, then these with each
 * fault, with each bad value. */
void api_sweep(const char *prefix);

/* A CMocka teardown: prints the case in which the sweep failed. */
int api_sweep_teardown(void **state);

/* The same for calls that a case makes one after the other: forgets the notes, and judges the call that was
 * drawn since. */
void api_begin(void);
void api_judge(const char *name, td_status status);

/* Takes random steps with a model, and those that were not refused with its twin, which must stay equal. */
void api_walk(void);

/* How often each function was called and refused, printed. */
void api_summary(void);
void api_list(void);

#endif
