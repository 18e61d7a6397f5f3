/* Collectives among processes, compared with float64. test_comm BACKEND RANKS starts the ranks itself. Under
 * mpirun the process is one of the ranks. Every rank draws the inputs of all ranks, so it can judge its
 * results alone. */
#include "base/clock.h"
#include "base/float16.h"
#include "base/rng.h"
#include "comm/agree.h"
#include "support/compare.h"
#include "support/fence.h"
#include "support/ranks.h"
#include "support/test.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

static td_device *dev;
static td_comm *comm;
static td_comm_info info;
static const td_comm_type all_types[] = {TD_COMM_F64, TD_COMM_F32, TD_COMM_F16, TD_COMM_BF16, TD_COMM_I64};
static const td_reduction all_reductions[] = {TD_SUM, TD_AVERAGE, TD_MAX};
enum { TYPES = 5, REDUCTIONS = 3 };

/* If true, this rank sleeps after each message, so that other ranks have time. */
static atomic_bool is_slow;

ssize_t __real_send(int socket, const void *data, size_t bytes, int flags);
ssize_t __wrap_send(int socket, const void *data, size_t bytes, int flags)
{
    const ssize_t sent = __real_send(socket, data, bytes, flags);

    if (is_slow)
        (void)usleep(2000);
    return sent;
}

/* ---- the device's memory ---- */

/* One block for a whole case. Each call takes the next part of it. NULL: each part is a separate block. */
static char *pool;
static size_t pool_used;
static int pool_parts;
enum { POOL = 48 << 20 };

static void *take(size_t bytes)
{
    void *block = NULL;

    if (!pool) {
        td_assert_ok(td_device_alloc(dev, bytes, &block));
        return block;
    }
    block = pool + pool_used;
    pool_used += (bytes + 255) / 256 * 256;
    pool_parts++;
    assert_true(pool_used <= POOL);
    return block;
}

static void drop(void *block)
{
    if (!pool)
        td_assert_ok(td_device_free(dev, block));
    else if (--pool_parts == 0)
        pool_used = 0;
}

/* Returns a copy of host memory in the device's memory; on a CPU the host memory itself. back() copies the
 * result to the host. */
static void *there(const void *host, size_t bytes)
{
    void *block = NULL;

    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        return (void *)host;
    block = take(bytes);
    td_assert_ok(td_device_upload(dev, block, host, bytes));
    return block;
}

static void back(void *host, void *block, size_t bytes)
{
    if (block == host)
        return;
    td_assert_ok(td_device_download(dev, host, block, bytes));
    drop(block);
}

/* ---- inputs and truth ---- */

static uint64_t stream; /* a number of the case, equal on every rank */

/* The elements of one rank's input: small whole numbers in every second case, whose sums are exact in every
 * type and order. */
static void draw(int rank, td_comm_type type, int64_t count, void *out)
{
    const td_rng rng = {.seed = 7 + (uint64_t)rank, .stream = stream};

    if (type == TD_COMM_I64) {
        td_assert_ok(td_rng_tokens(&rng, 0, count, INT64_C(1) << 40, out));
        for (int64_t i = 0; i < count; i++)
            ((int64_t *)out)[i] -= INT64_C(1) << 39;
        return;
    }
    float *numbers = malloc((size_t)count * sizeof *numbers + 1);
    assert_non_null(numbers);
    td_assert_ok(td_rng_normal(&rng, 0, count, 0.25f, 1.0f, numbers));
    for (int64_t i = 0; i < count && stream % 2; i++)
        numbers[i] = rintf(numbers[i]);
    td_assert_ok(td_convert(count, TD_F32, numbers, (td_dtype)type, out));
    free(numbers);
}

static double value(td_comm_type type, const void *data, int64_t i)
{
    return type == TD_COMM_I64 ? (double)((const int64_t *)data)[i] : td_value_at((td_dtype)type, data, i);
}

/* The exact result of each element, and the sum of the inputs' magnitudes. */
typedef struct truth {
    double *value, *magnitude;
    int64_t *exact; /* for i64 */
} truth;

static truth truth_of(td_comm_type type, td_reduction reduction, int64_t count)
{
    const size_t room = (size_t)count + 1;
    truth t = {calloc(room, sizeof(double)), calloc(room, sizeof(double)), calloc(room, sizeof(int64_t))};
    void *input = malloc(room * 8);

    for (int rank = 0; rank < info.ranks; rank++) {
        draw(rank, type, count, input);
        for (int64_t i = 0; i < count; i++) {
            const double x = value(type, input, i);
            const int64_t n = type == TD_COMM_I64 ? ((int64_t *)input)[i] : 0;

            t.magnitude[i] += fabs(x);
            if (reduction == TD_MAX) {
                t.value[i] = rank == 0 || x > t.value[i] ? x : t.value[i];
                t.exact[i] = rank == 0 || n > t.exact[i] ? n : t.exact[i];
            } else {
                t.value[i] += x;
                t.exact[i] += n;
            }
        }
    }
    for (int64_t i = 0; i < count && reduction == TD_AVERAGE; i++) {
        t.value[i] /= info.ranks;
        t.magnitude[i] /= info.ranks;
        t.exact[i] /= info.ranks;
    }
    free(input);
    return t;
}

static void truth_free(truth t)
{
    free(t.value);
    free(t.magnitude);
    free(t.exact);
}

/* If numbers are not whole, each of the ranks - 1 additions may err by half a unit in the last place of the
 * sum so far. An average also rounds its factor and its result. */
static void judge(const char *what, td_comm_type type, td_reduction reduction, const void *got,
                  const truth *t, int64_t first, int64_t count)
{
    static const double halves[] = {0x1p-53, 0x1p-24, 0x1p-11, 0x1p-8};

    for (int64_t i = 0; i < count; i++) {
        const double x = value(type, got, i), want = t->value[first + i];
        double allowed = 0;

        if (type == TD_COMM_I64) {
            if (((const int64_t *)got)[i] != t->exact[first + i])
                fail_msg("%s: element %" PRId64 " is %" PRId64 ", not %" PRId64, what, i,
                         ((const int64_t *)got)[i], t->exact[first + i]);
            continue;
        }
        if (reduction == TD_AVERAGE || (reduction == TD_SUM && stream % 2 == 0))
            allowed = (info.ranks - 1 + (reduction == TD_AVERAGE ? 2 : 0)) * halves[type] *
                          t->magnitude[first + i] * (1 + halves[type] * info.ranks) +
                      (type == TD_COMM_F16 ? 0x1p-24 : 0);
        if (!(fabs(x - want) <= allowed))
            fail_msg("%s: element %" PRId64 " is %.9g, not %.9g to within %.3g", what, i, x, want, allowed);
    }
}

/* ---- the cases ---- */

/* The step between the combinations that run, because more ranks than processors take long. It has no common
 * factor with the numbers of types and reductions. */
static int stride(void)
{
    return info.ranks > 3 || info.hosts > 1 ? 17 : info.ranks == 3 ? 4 : 1;
}

static const int64_t counts[] = {0, 1, 2, 3, 5, 6, 7, 64, 1009, 4099};
enum { COUNTS = sizeof counts / sizeof *counts };

/* Parts in a window begin at multiples of 16 bytes. */
static int64_t of_part(int64_t count)
{
    return pool ? (count + 7) / 8 * 8 : count;
}

static void all_reduce_case(td_comm_type type, td_reduction reduction, int64_t count, bool in_place)
{
    const size_t bytes = (size_t)count * td_comm_type_size(type);
    unsigned char *in = td_fence_alloc(bytes), *out = in_place ? in : td_fence_alloc(bytes),
                  *copy = malloc(bytes + 1);
    char what[96];

    stream++;
    draw(info.rank, type, count, in);
    memcpy(copy, in, bytes);
    void *dev_in = there(in, bytes), *dev_out = in_place ? dev_in : there(out, bytes);
    td_assert_ok(td_comm_all_reduce(comm, dev_in, dev_out, count, type, reduction, NULL));
    if (!in_place)
        back(out, dev_out, bytes);
    back(in, dev_in, bytes);
    truth t = truth_of(type, reduction, count);
    snprintf(what, sizeof what, "all_reduce of %" PRId64 " %s, reduction %d%s", count,
             td_comm_type_name(type), (int)reduction, in_place ? ", in place" : "");
    judge(what, type, reduction, out, &t, 0, count);
    if (!in_place)
        assert_memory_equal(in, copy, bytes);
    if (count == 1009)
        td_ranks_assert_same(comm, out, bytes);
    truth_free(t);
    free(copy);
    td_fence_free(in);
    if (!in_place)
        td_fence_free(out);
}

/* i64, the last type, has no average. */
static td_reduction reduction_of(int i)
{
    const td_reduction reduction = all_reductions[i / TYPES % REDUCTIONS];

    return reduction == TD_AVERAGE && i % TYPES == TYPES - 1 ? TD_SUM : reduction;
}

TD_TEST(all_reduce_is_the_reduction_of_all)
{
    for (int i = 0; i < TYPES * REDUCTIONS * COUNTS * 2; i += stride())
        all_reduce_case(all_types[i % TYPES], reduction_of(i), counts[i / (TYPES * REDUCTIONS) % COUNTS],
                        i / (TYPES * REDUCTIONS * COUNTS));
    for (int i = 0; i < TYPES - 1; i++) /* several pieces and a tail */
        all_reduce_case(all_types[i], TD_AVERAGE, 400003, i % 2);
}

/* Values near the largest and near the smallest numbers of f16. */
TD_TEST(an_average_of_f16_is_finite)
{
    static const float numbers[] = {60000, -65504, 0.333251953125f, 0x1p-14f};
    td_f16 in[4], out[4], parts[4 * TD_COMM_MOST_RANKS], part[4];

    td_assert_ok(td_convert(4, TD_F32, numbers, TD_F16, in));
    for (int rank = 0; rank < info.ranks; rank++)
        memcpy(parts + rank * 4, in, sizeof in);
    char *dev_in = there(in, sizeof in), *dev_parts = there(parts, (size_t)info.ranks * sizeof in);
    void *dev_out = there(out, sizeof out), *dev_part = there(part, sizeof part);
    td_assert_ok(td_comm_all_reduce(comm, dev_in, dev_out, 4, TD_COMM_F16, TD_AVERAGE, NULL));
    td_assert_ok(td_comm_reduce_scatter(comm, dev_parts, dev_part, 4, TD_COMM_F16, TD_AVERAGE, NULL));
    back(out, dev_out, sizeof out);
    back(part, dev_part, sizeof part);
    back(parts, dev_parts, (size_t)info.ranks * sizeof in);
    back(in, dev_in, sizeof in);
    for (int i = 0; i < 4; i++) {
        const double bound = fabs((double)numbers[i]) * info.ranks * 0x1p-11;

        assert_true(fabs(value(TD_COMM_F16, out, i) - (double)numbers[i]) <= bound);
        assert_true(fabs(value(TD_COMM_F16, part, i) - (double)numbers[i]) <= bound);
    }
    assert_memory_equal(parts, in, sizeof in); /* the input is only read */
}

static void reduce_scatter_case(td_comm_type type, td_reduction reduction, int64_t elements, bool in_place)
{
    const int64_t count = of_part(elements);
    const int64_t whole = count * info.ranks;
    const size_t size = td_comm_type_size(type), bytes = (size_t)count * size;
    unsigned char *in = td_fence_alloc((size_t)whole * size), *copy = malloc((size_t)whole * size + 1);
    unsigned char *out = in_place ? in + (size_t)info.rank * bytes : td_fence_alloc(bytes);

    stream++;
    draw(info.rank, type, whole, in);
    memcpy(copy, in, (size_t)whole * size);
    char *dev_in = there(in, (size_t)whole * size);
    void *dev_out = in_place ? dev_in + (size_t)info.rank * bytes : there(out, bytes);
    td_assert_ok(td_comm_reduce_scatter(comm, dev_in, dev_out, count, type, reduction, NULL));
    if (!in_place)
        back(out, dev_out, bytes);
    back(in, dev_in, (size_t)whole * size);
    truth t = truth_of(type, reduction, whole);
    judge("reduce_scatter", type, reduction, out, &t, info.rank * count, count);
    if (!in_place) {
        assert_memory_equal(in, copy, (size_t)whole * size);
        td_fence_free(out);
    }
    truth_free(t);
    free(copy);
    td_fence_free(in);
}

TD_TEST(reduce_scatter_gives_each_rank_its_part)
{
    for (int i = 0; i < TYPES * REDUCTIONS * COUNTS * 2; i += stride())
        reduce_scatter_case(all_types[i % TYPES], reduction_of(i), counts[i / (TYPES * REDUCTIONS) % COUNTS],
                            i / (TYPES * REDUCTIONS * COUNTS));
    reduce_scatter_case(TD_COMM_F32, TD_SUM, 300007, false);
    reduce_scatter_case(TD_COMM_BF16, TD_SUM, 600011, true);
}

static void all_gather_case(td_comm_type type, int64_t elements, bool in_place)
{
    const int64_t count = of_part(elements);
    const size_t size = td_comm_type_size(type), bytes = (size_t)count * size;
    unsigned char *out = td_fence_alloc(bytes * (size_t)info.ranks), *want = malloc(bytes + 1);
    unsigned char *in = in_place ? out + (size_t)info.rank * bytes : td_fence_alloc(bytes);

    stream++;
    draw(info.rank, type, count, in);
    char *dev_out = there(out, bytes * (size_t)info.ranks);
    void *dev_in = in_place ? dev_out + (size_t)info.rank * bytes : there(in, bytes);
    td_assert_ok(td_comm_all_gather(comm, dev_in, dev_out, count, type, NULL));
    if (!in_place)
        back(in, dev_in, bytes);
    back(out, dev_out, bytes * (size_t)info.ranks);
    for (int rank = 0; rank < info.ranks; rank++) {
        draw(rank, type, count, want);
        assert_memory_equal(out + (size_t)rank * bytes, want, bytes);
    }
    free(want);
    if (!in_place)
        td_fence_free(in);
    td_fence_free(out);
}

static void broadcast_case(td_comm_type type, int64_t count, int root)
{
    const size_t bytes = (size_t)count * td_comm_type_size(type);
    unsigned char *buffer = td_fence_alloc(bytes), *want = malloc(bytes + 1);

    stream++;
    draw(root, type, count, want);
    if (info.rank == root)
        memcpy(buffer, want, bytes);
    void *dev_buffer = there(buffer, bytes);
    td_assert_ok(td_comm_broadcast(comm, dev_buffer, count, type, root, NULL));
    back(buffer, dev_buffer, bytes);
    assert_memory_equal(buffer, want, bytes);
    free(want);
    td_fence_free(buffer);
}

TD_TEST(all_gather_and_broadcast_copy_bits)
{
    for (int i = 0; i < TYPES * COUNTS; i += stride())
        for (int in_place = 0; in_place < 2; in_place++)
            all_gather_case(all_types[i % TYPES], counts[i / TYPES], in_place);
    all_gather_case(TD_COMM_F32, 300007, false);
    for (int i = 0; i < TYPES * COUNTS; i += stride())
        broadcast_case(all_types[i % TYPES], counts[i / TYPES], i % info.ranks);
    broadcast_case(TD_COMM_I64, 300007, info.ranks - 1);
}

/* The order of Gloo's ring with two ranks is known, so every bit is known. */
TD_TEST(sums_have_the_bits_of_their_order)
{
    enum { COUNT = 300007 };
    const int64_t ranks = info.ranks, bytes = COUNT * 4;
    int64_t segments = (bytes + (1 << 20) - 1) >> 20;
    float *inputs[16], *out = td_fence_alloc(COUNT * sizeof *out);

    if (info.backend != TD_COMM_GLOO && ranks != 2) {
        td_fence_free(out);
        skip();
    }
    stream += 2 - stream % 2;
    for (int rank = 0; rank < ranks; rank++) {
        inputs[rank] = malloc(COUNT * sizeof *inputs[rank]);
        draw(rank, TD_COMM_F32, COUNT, inputs[rank]);
    }
    void *dev_in = there(inputs[info.rank], COUNT * 4), *dev_out = there(out, COUNT * 4);
    td_assert_ok(td_comm_all_reduce(comm, dev_in, dev_out, COUNT, TD_COMM_F32, TD_SUM, NULL));
    back(out, dev_out, COUNT * 4);
    back(inputs[info.rank], dev_in, COUNT * 4);
    segments = segments > 2 * ranks ? segments : 2 * ranks;
    segments = (segments + ranks - 1) / ranks * ranks;
    const int64_t segment = ((bytes + segments - 1) / segments + 3) / 4; /* elements */
    for (int64_t i = 0; i < COUNT; i++) {
        const int64_t part = i / segment / (segments / ranks);
        float sum = inputs[(part + ranks - 1) % ranks][i];

        for (int64_t step = 2; step <= ranks; step++)
            sum = inputs[(part + ranks - step) % ranks][i] + sum;
        if (memcmp(&sum, &out[i], sizeof sum) != 0)
            fail_msg("element %" PRId64 " is %.9g, by the ring's order %.9g", i, (double)out[i], (double)sum);
    }
    for (int rank = 0; rank < ranks; rank++)
        free(inputs[rank]);
    td_fence_free(out);
}

TD_TEST(handles_are_waited_for_in_any_order)
{
    enum { WORKS = 200 };
    static float in[WORKS][32], out[WORKS][32];
    td_work *works[WORKS];
    bool done = false;

    for (int i = 0; i < WORKS; i++) {
        for (int j = 0; j < 32; j++)
            in[i][j] = (float)(i * info.rank + j);
    }
    float *dev_in = there(in, sizeof in), *dev_out = there(out, sizeof out);
    for (int i = 0; i < WORKS; i++) {
        td_assert_ok(td_comm_all_reduce(comm, dev_in + (size_t)i * 32, dev_out + (size_t)i * 32, 32,
                                        TD_COMM_F32, TD_SUM, &works[i]));
        assert_non_null(works[i]);
    }
    while (!done)
        td_assert_ok(td_work_test(works[WORKS - 1], &done));
    for (int i = WORKS - 1; i >= 0; i--)
        td_assert_ok(i % 2 ? td_work_wait(works[i]) : td_work_queue_wait(works[i]));
    back(out, dev_out, sizeof out);
    back(in, dev_in, sizeof in);
    for (int i = 0; i < WORKS; i++)
        for (int j = 0; j < 32; j++)
            assert_true(out[i][j] == (float)(i * info.ranks * (info.ranks - 1) / 2 + j * info.ranks));
}

TD_TEST(there_are_1024_handles)
{
    static td_work *works[1025];
    static int64_t numbers[1025];
    int made = 0;

    int64_t *dev_numbers = there(numbers, sizeof numbers);
    while (made < 1025 &&
           td_comm_broadcast(comm, &dev_numbers[made], 1, TD_COMM_I64, 0, &works[made]) == TD_OK)
        made++;
    assert_int_equal(made, 1024);
    assert_null(works[1024]);
    td_assert_refused(td_comm_barrier(comm), TD_BAD_STATE, "1024 collectives are unfinished");
    for (int i = 0; i < made; i++)
        td_assert_ok(td_work_wait(works[i]));
    back(numbers, dev_numbers, sizeof numbers);
    td_assert_ok(td_comm_barrier(comm));
}

TD_TEST(close_ends_1024_handles)
{
    td_comm *alone;
    td_work *work;
    int64_t *number = there(&(int64_t){0}, sizeof *number);

    td_assert_ok(td_comm_open(dev, &(td_comm_options){.backend = info.backend, .ranks = 1}, &alone));
    for (int i = 0; i < 1024; i++)
        td_assert_ok(td_comm_broadcast(alone, number, 1, TD_COMM_I64, 0, &work));
    td_assert_ok(td_comm_close(alone));
}

TD_TEST(ranks_know_each_other)
{
    int32_t *all = calloc((size_t)info.ranks, sizeof *all);

    td_assert_ok(td_comm_exchange(comm, &info.rank, sizeof info.rank, all));
    for (int rank = 0; rank < info.ranks; rank++)
        assert_int_equal(all[rank], rank);
    free(all);
    assert_true(info.hosts >= 1 && info.hosts <= info.ranks);
    assert_true(info.local_rank >= 0 && info.local_rank < info.local_ranks);
    if (info.ranks > 1)
        assert_non_null(strstr(info.library, info.backend == TD_COMM_MPI    ? "MPI"
                                             : info.backend == TD_COMM_GLOO ? "Gloo"
                                                                            : "NCCL"));
    /* The largest exchange. */
    char *mine = malloc(32768), *theirs = malloc(32768 * (size_t)info.ranks);
    memset(mine, 'a' + info.rank, 32768);
    td_assert_ok(td_comm_exchange(comm, mine, 32768, theirs));
    for (int rank = 0; rank < info.ranks; rank++)
        assert_true(theirs[32768 * rank] == 'a' + rank && theirs[32768 * rank + 32767] == 'a' + rank);
    free(mine);
    free(theirs);
    td_setting settings[5000]; /* more than an exchange holds */
    for (int i = 0; i < 5000; i++)
        settings[i] = (td_setting){"many", i};
    td_assert_ok(td_comm_agree(comm, 5000, settings));
}

/* Rank 1's setting differs. A rank that finds this and gives up at once must not end a slow rank before that
 * rank has found it too. */
TD_TEST(every_rank_says_what_differs)
{
    for (int slow = 0; slow < 2; slow++) { /* the slow rank is rank 0, or another rank */
        const td_setting setting = {"layers", info.rank == 1 ? 3 : 2};
        char name[16];

        snprintf(name, sizeof name, "odd%d", slow);
        td_comm *other = td_ranks_other(dev, comm, name);
        if (!other)
            return;
        is_slow = slow == info.rank;
        td_assert_refused(td_comm_agree(other, 1, &setting), TD_BAD_ARGUMENT,
                          "layers: rank 1 has 3, where rank 0 has 2");
        is_slow = false;
        td_assert_ok(td_comm_abort(other, "its program failed"));
        (void)td_comm_close(other);
    }
}

/* Counts that do not fit an int. The environment asks for this test, because it needs gigabytes. */
/* An exchange has room for 4096 settings. */
TD_TEST(the_last_of_many_settings_is_compared)
{
    td_setting settings[5000];

    for (int i = 0; i < 5000; i++)
        settings[i] = (td_setting){"settings", i};
    td_assert_ok(td_comm_agree(comm, 5000, settings));
    settings[4999] = (td_setting){"last", info.rank};
    if (info.ranks > 1)
        td_assert_refused(td_comm_agree(comm, 5000, settings), TD_BAD_ARGUMENT,
                          "last: rank 1 has 1, where rank 0 has 0");
}

TD_TEST(more_elements_than_an_int_counts)
{
    const int64_t count = (INT64_C(1) << 31) + 3;

    if (!getenv("TD_COMM_LARGE") || info.backend == TD_COMM_NCCL)
        skip();
    uint16_t *data = malloc((size_t)count * 2);
    assert_non_null(data);
    for (int64_t i = 0; i < count; i++)
        data[i] = i % 3 ? 0x3F80 : 0x4000; /* 1 and 2 in bf16 */
    td_assert_ok(td_comm_all_reduce(comm, data, data, count, TD_COMM_BF16, TD_AVERAGE, NULL));
    for (int64_t i = 0; i < count; i++)
        if (data[i] != (i % 3 ? 0x3F80 : 0x4000))
            fail_msg("element %" PRId64 " is %x", i, data[i]);
    data[count - 1] = (uint16_t)(info.rank + 5);
    td_assert_ok(td_comm_broadcast(comm, data, count, TD_COMM_BF16, info.ranks - 1, NULL));
    assert_int_equal(data[count - 1], info.ranks + 4);
    free(data);
}

/* ---- times of calls ---- */

TD_TEST(spans_are_of_the_calls_in_order)
{
    enum { COUNT = 1000 };
    float *mine = calloc(COUNT, sizeof *mine), *all = calloc((size_t)info.ranks * COUNT, sizeof *all);
    float *in = there(mine, COUNT * sizeof *mine);
    float *out = there(all, (size_t)info.ranks * COUNT * sizeof *all);
    static const char *const names[] = {"all_reduce", "all_gather", "broadcast"};
    const int64_t bytes[] = {4 * COUNT, (int64_t)info.ranks * 4 * (COUNT / 2), 4};
    const td_comm_span *spans = NULL;
    td_work *works[3] = {0};
    int64_t count = -1, before;

    td_assert_ok(td_comm_watch(comm, 3));
    td_assert_ok(td_comm_watched(comm, &spans, &count));
    assert_int_equal(count, 0);
    before = td_clock_ns();
    td_assert_ok(td_comm_all_reduce(comm, in, in, COUNT, TD_COMM_F32, TD_SUM, &works[0]));
    td_assert_refused(td_comm_watched(comm, &spans, &count), TD_BAD_STATE, "1 collectives are unfinished");
    td_assert_refused(td_comm_watch(comm, 0), TD_BAD_STATE, "1 collectives are unfinished");
    td_assert_ok(td_comm_all_gather(comm, in, out, COUNT / 2, TD_COMM_F32, &works[1]));
    td_assert_ok(td_comm_broadcast(comm, in, 1, TD_COMM_F32, 0, &works[2]));
    for (int i = 0; i < 3; i++)
        td_assert_ok(td_work_wait(works[i]));
    td_assert_ok(td_comm_barrier(comm)); /* a barrier has no elements and is not watched */
    td_assert_ok(td_comm_broadcast(comm, in, 0, TD_COMM_F32, 0, NULL));
    td_assert_ok(td_comm_watched(comm, &spans, &count));
    assert_int_equal(count, 3);
    for (int i = 0; i < 3; i++) {
        assert_string_equal(spans[i].call, names[i]);
        assert_int_equal(spans[i].bytes, bytes[i]);
        assert_true(spans[i].begin_ns <= spans[i].end_ns && spans[i].end_ns <= td_clock_ns() + 1000000);
        assert_true(spans[i].begin_ns >= (i > 0 ? spans[i - 1].end_ns : before));
    }
    td_assert_ok(td_comm_broadcast(comm, in, 1, TD_COMM_F32, 0, NULL));
    td_assert_refused(td_comm_watched(comm, &spans, &count), TD_BAD_STATE,
                      "4 collectives were made, capacity is 3");
    td_assert_ok(td_comm_watch(comm, 0));
    td_assert_ok(td_comm_broadcast(comm, in, 1, TD_COMM_F32, 0, NULL));
    td_assert_ok(td_comm_watched(comm, &spans, &count));
    assert_int_equal(count, 0);
    back(mine, in, COUNT * sizeof *mine);
    back(all, out, (size_t)info.ranks * COUNT * sizeof *all);
    free(mine);
    free(all);
}

/* ---- streams and graphs ---- */

/* A stream that waits for a handle continues after the collective. The collective runs after the work that
 * made its input. */
TD_TEST(a_handle_orders_streams)
{
    enum { COUNT = 5001, FILLS = 200 };
    const size_t bytes = COUNT * sizeof(float), much = (size_t)1 << 28;
    td_stream *side = NULL;
    td_work *work = NULL;
    void *slow;

    if (info.backend != TD_COMM_NCCL)
        skip();
    float *mine = malloc(bytes), *got = malloc(bytes);

    stream++;
    draw(info.rank, TD_COMM_F32, COUNT, mine);
    float *from = there(mine, bytes), *in = there(mine, bytes), *copy = there(mine, bytes);
    td_assert_ok(td_device_alloc(dev, much, &slow));
    td_assert_ok(td_stream_create(dev, &side));
    for (int in_place = 0; in_place < 2; in_place++) {
        float *const out = in_place ? in : there(mine, bytes);

        td_assert_ok(td_device_fill(dev, in, 0xFF, bytes));
        td_assert_ok(td_device_fill(dev, out, 0xFF, bytes));
        td_assert_ok(td_device_fill(dev, copy, 0xFF, bytes));
        td_assert_ok(td_device_synchronize(dev));
        for (int i = 0; i < FILLS; i++)
            td_assert_ok(td_device_fill(dev, slow, i, much));
        td_assert_ok(td_device_copy(dev, in, from, bytes));
        td_assert_ok(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &work));
        td_assert_ok(td_device_set_stream(dev, side));
        td_assert_ok(td_work_queue_wait(work));
        td_assert_ok(td_device_copy(dev, copy, out, bytes));
        td_assert_ok(td_device_download(dev, got, copy, bytes));
        td_assert_ok(td_device_set_stream(dev, NULL));
        const truth t = truth_of(TD_COMM_F32, TD_SUM, COUNT);
        judge("on another stream", TD_COMM_F32, TD_SUM, got, &t, 0, COUNT);
        truth_free(t);
        td_assert_ok(td_device_synchronize(dev));
        if (!in_place)
            td_assert_ok(td_device_free(dev, out));
    }
    td_stream_destroy(side);
    td_assert_ok(td_device_free(dev, slow));
    td_assert_ok(td_device_free(dev, from));
    td_assert_ok(td_device_free(dev, in));
    td_assert_ok(td_device_free(dev, copy));
    free(mine);
    free(got);
}

/* Launches a graph three times. Each time the result is the sum of what all ranks have then. */
TD_TEST(collectives_are_captured)
{
    enum { COUNT = 5001, LAUNCHES = 3 };
    td_work *work = NULL;
    td_graph *graph = NULL;
    bool done;

    if (info.backend != TD_COMM_NCCL)
        skip();
    float *mine = malloc(COUNT * sizeof *mine), *got = malloc(COUNT * sizeof *got);

    stream++;
    draw(info.rank, TD_COMM_F32, COUNT, mine);
    float *in = there(mine, COUNT * sizeof *mine), *out = there(mine, COUNT * sizeof *mine);
    float *root = there(mine, COUNT * sizeof *mine);
    td_assert_ok(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL));
    td_assert_ok(td_graph_begin(dev));
    td_assert_refused(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, NULL), TD_BAD_STATE,
                      "pass `work`");
    td_assert_ok(td_comm_all_reduce(comm, in, out, COUNT, TD_COMM_F32, TD_SUM, &work));
    td_assert_refused(td_work_test(work, &done), TD_BAD_STATE, "part of a graph");
    td_assert_ok(td_work_queue_wait(work));
    td_assert_ok(td_comm_broadcast(comm, root, COUNT, TD_COMM_F32, info.ranks - 1, &work));
    td_assert_ok(td_work_queue_wait(work));
    td_assert_ok(td_graph_end(dev, &graph));
    if (info.ranks > 1)
        td_assert_refused(td_comm_close(comm), TD_BAD_STATE, "1 graphs with collectives");
    for (int i = 0; i < LAUNCHES; i++) {
        stream++;
        draw(info.rank, TD_COMM_F32, COUNT, mine);
        td_assert_ok(td_device_upload(dev, in, mine, COUNT * sizeof *mine));
        td_assert_ok(td_device_upload(dev, root, mine, COUNT * sizeof *mine));
        td_assert_ok(td_device_fill(dev, out, 0xFF, COUNT * sizeof *mine));
        td_assert_ok(td_graph_launch(graph));
        td_assert_ok(td_device_download(dev, got, out, COUNT * sizeof *got));
        const truth t = truth_of(TD_COMM_F32, TD_SUM, COUNT);
        judge("of a graph", TD_COMM_F32, TD_SUM, got, &t, 0, COUNT);
        truth_free(t);
        td_assert_ok(td_device_download(dev, got, root, COUNT * sizeof *got));
        draw(info.ranks - 1, TD_COMM_F32, COUNT, mine);
        assert_memory_equal(got, mine, COUNT * sizeof *mine);
        /* Calls between launches work as usual. */
        td_assert_ok(td_comm_all_reduce(comm, in, in, COUNT, TD_COMM_F32, TD_MAX, NULL));
    }
    td_graph_destroy(graph);
    drop(in);
    drop(out);
    drop(root);
    free(mine);
    free(got);
}

/* ---- windows ---- */

TD_TEST(results_in_windows_are_the_same)
{
    const bool direct = td_ranks_direct(&info);
    td_comm_window *window = NULL, *second = NULL;
    td_comm_info now;
    void *block;

    td_assert_ok(td_device_alloc(dev, POOL, &block));
    td_assert_ok(td_comm_window_create(comm, block, POOL, &window));
    td_assert_ok(td_comm_window_create(comm, (char *)block + 1000, 1, &second));
    td_comm_window_destroy(second);
    td_assert_ok(td_comm_describe(comm, &now));
    assert_int_equal(now.windows, direct);
    if (direct) {
        /* NCCL would compute a wrong second part. */
        td_assert_refused(
            td_comm_reduce_scatter(comm, block, (char *)block + 256, 5, TD_COMM_F16, TD_SUM, NULL),
            TD_BAD_ARGUMENT, "count is 5 f16, needs parts of a multiple of 16 bytes in a window");
        td_assert_refused(
            td_comm_all_reduce(comm, (char *)block + 8, (char *)block + 256, 5, TD_COMM_F32, TD_SUM, NULL),
            TD_BAD_ARGUMENT, "in is at byte 8 of a window");
        pool = block;
        all_reduce_is_the_reduction_of_all(state);
        reduce_scatter_gives_each_rank_its_part(state);
        all_gather_and_broadcast_copy_bits(state);
        collectives_are_captured(state);
        assert_int_equal(pool_parts, 0);
        pool = NULL;
    }
    td_assert_ok(td_device_free(dev, block));
    td_assert_ok(td_comm_describe(comm, &now));
    assert_int_equal(now.windows, 0);
    td_comm_window_destroy(window);
    td_assert_ok(td_comm_barrier(comm));
    all_reduce_case(TD_COMM_F32, TD_SUM, 400003, true);
}

/* A host does not queue many launches before its GPU has run them: only a few are left after the last
 * call. */
TD_TEST(launches_wait_for_earlier_launches)
{
    enum { COUNT = 5001, FILLS = 100, LAUNCHES = 20 };
    const size_t much = (size_t)1 << 28;
    td_work *work = NULL;
    td_graph *graph = NULL;
    void *slow;

    if (info.backend != TD_COMM_NCCL || info.ranks == 1)
        skip();
    float *mine = calloc(COUNT, sizeof *mine), *in = there(mine, COUNT * sizeof *mine);
    td_assert_ok(td_device_alloc(dev, much, &slow));
    td_assert_ok(td_graph_begin(dev));
    for (int i = 0; i < FILLS; i++)
        td_assert_ok(td_device_fill(dev, slow, i, much));
    td_assert_ok(td_comm_all_reduce(comm, in, in, COUNT, TD_COMM_F32, TD_SUM, &work));
    td_assert_ok(td_work_queue_wait(work));
    td_assert_ok(td_graph_end(dev, &graph));
    td_assert_ok(td_graph_launch(graph)); /* the first launch uploads the graph */
    td_assert_ok(td_device_synchronize(dev));
    const int64_t begun_ns = td_clock_ns();
    for (int i = 0; i < LAUNCHES; i++)
        td_assert_ok(td_graph_launch(graph));
    const int64_t launched_ns = td_clock_ns();
    td_assert_ok(td_device_synchronize(dev));
    const int64_t ended_ns = td_clock_ns();
    assert_true(4 * (ended_ns - launched_ns) < ended_ns - begun_ns);
    td_graph_destroy(graph);
    td_assert_ok(td_device_free(dev, slow));
    td_assert_ok(td_device_free(dev, in));
    free(mine);
}

int main(int argc, char **argv)
{
    int result;

    if (!td_ranks_begin(argc, argv, &dev, &comm, &result))
        return result;
    td_assert_ok(td_comm_describe(comm, &info));
    const int failed = td_run_tests(argv[1], NULL, NULL);
    const td_status status = td_comm_close(comm);
    if (status != TD_OK)
        fprintf(stderr, "%s\n", td_last_error());
    /* MPI starts only once in a process. A second communicator gets an error that says so. */
    const td_comm_options options = td_ranks_options(info.backend);
    if (info.backend == TD_COMM_MPI && options.ranks > 1 && status == TD_OK &&
        (td_comm_open(dev, &options, &comm) == TD_OK || !strstr(td_last_error(), "starts only once")))
        return fprintf(stderr, "a second communicator of MPI: %s\n", td_last_error()), 1;
    td_device_close(dev);
    return failed || status != TD_OK;
}
