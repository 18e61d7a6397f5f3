/* The option matrix: options that change only how and when a step is computed must not change the bits of a
 * trainer's steps. test_matrix BACKEND RANKS starts the ranks itself. Under mpirun the process is one of the
 * ranks.
 *
 * With more than 2 ranks the backend chooses the order of a sum, so results are only close to the expected
 * ones, and cells have SGD, which hardly enlarges the difference.
 *
 * A cell is a value of each axis. A run tests enough cells that every pair of values occurs. A run with one
 * rank also tests every cell without links. With a third argument every cell is tested, from cell
 * TANDEM_FUZZ_SEED on. This ends after TANDEM_FUZZ_SECONDS, or without them after the seconds that the
 * argument gives. ci/fuzz sets both.
 *
 * This process computes the expected result: it has a trainer for each rank, and adds their gradients in the
 * order of ranks. With 1 and 2 ranks the bits are the same, because a sum of two numbers has only one order.
 * Some combinations change the bits and are not tested here: clipping with sharding, one batch on 1 and 2
 * ranks, more than one reduction per step, and GEMMs on fewer SMs of a GPU. */
#include "ddp/reduce.h"
#include "shard/state.h"

#include "base/clock.h"
#include "support/as_if_graphs.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/draw.h"
#include "support/fence.h"
#include "support/ranks.h"
#include "support/test.h"
#include "support/weights.h"

#include <math.h>

enum {
    BATCH = 2,
    CONTEXT = 8,
    VOCAB = 29,
    LAYERS = 3,
    MICROS = 3,
    STEPS = 3,
    AS_IF_STEPS = 2,
    MOST_RANKS = 3
};

static td_device *dev;
static td_comm *comm;
static td_comm_info info;

/* ---- cells ---- */

typedef enum axis {
    KEEP,
    MICRO,
    TRANSIENT,
    CAPTURED,
    PARTS,
    UPDATE,
    OPTIMIZER,
    GROUPS,
    SPLIT,
    MASTERS,
    AXES
} axis;

enum { VALUES = 9 }; /* the most values of an axis */

typedef enum split { NONE, NAIVE, FLAT, OVERLAP, BUCKETED, TENSORS, ONE_BUCKET, SMALL_BUCKETS, FULL } split;

static const char *const names[AXES][VALUES] = {
    [KEEP] = {"most", "all", "checkpoints of 1 layer", "checkpoints of 2 layers"},
    [MICRO] = {"1 micro-batch", "3 micro-batches"},
    [TRANSIENT] = {"gradients", "transient gradients"},
    [CAPTURED] = {"queued", "captured"},
    [PARTS] = {"whole", "in parts"},
    [UPDATE] = {"update along", "update after"},
    [OPTIMIZER] = {"adamw", "sgd"},
    [GROUPS] = {"1 group", "2 groups"},
    [SPLIT] = {"no link", "ddp naive", "ddp flat", "ddp overlap", "ddp bucketed", "shard tensors",
               "shard flat, 1 bucket", "shard flat", "shard full"},
    [MASTERS] = {"f32", "bf16", "planes of bf16_mixed", "planes with f32 gradients"}};

/* The precision of each kind of masters. A new kind needs a name, a line in config_of, and its arenas. */
static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16, TD_PRECISION_BF16_MIXED,
                                          TD_PRECISION_BF16_MIXED};

typedef struct cell {
    int at[AXES]; /* the index of the value on each axis */
} cell;

static int values_of(axis a)
{
    int count = 0;

    while (count < VALUES && names[a][count])
        count++;
    return count;
}

static int product(void)
{
    int all = 1;

    for (axis a = KEEP; a < AXES; a++)
        all *= values_of(a);
    return all;
}

static cell cell_of(int number)
{
    cell c;

    for (axis a = KEEP; a < AXES; a++) {
        c.at[a] = number % values_of(a);
        number /= values_of(a);
    }
    return c;
}

static int64_t micros_of(const cell *c)
{
    return c->at[MICRO] ? MICROS : 1;
}

static bool on_gpu(void)
{
    return td_device_kind_of(dev) != TD_DEVICE_CPU;
}

/* On a CPU graphs are simulated (as_if_graphs.h). The simulation does not work for collectives of one
 * rank. */
static bool possible(const cell *c)
{
    return !(c->at[TRANSIENT] && c->at[MICRO] > 0) && !(c->at[SPLIT] == NONE && info.ranks > 1) &&
           !(c->at[OPTIMIZER] == 0 && info.ranks > 2) &&
           !(c->at[CAPTURED] && c->at[SPLIT] != NONE && info.ranks == 1 && !on_gpu());
}

static const char *name_of(const cell *c)
{
    static char name[256];
    size_t at = 0;

    for (axis a = KEEP; a < AXES; a++)
        at += (size_t)snprintf(name + at, sizeof name - at, "%s%s", a ? ", " : "", names[a][c->at[a]]);
    return name;
}

/* ---- pairs of values ---- */

static bool seen[AXES][VALUES][AXES][VALUES];

/* Returns the number of the cell's pairs that no earlier cell had. With `mark` they count as tested. */
static int new_pairs(const cell *c, bool mark)
{
    int count = 0;

    for (axis a = KEEP; a < AXES; a++)
        for (axis b = KEEP; b < a; b++) {
            bool *const had = &seen[a][c->at[a]][b][c->at[b]];

            count += !*had;
            *had |= mark;
        }
    return count;
}

/* The possible cell with the most new pairs. Returns false if there are none left. */
static bool next_by_pairs(cell *out)
{
    int most = 0;

    for (int number = 0; number < product(); number++) {
        const cell c = cell_of(number);
        const int count = possible(&c) ? new_pairs(&c, false) : 0;

        if (count > most) {
            most = count;
            *out = c;
        }
    }
    return most > 0 && new_pairs(out, true) > 0;
}

/* ---- trainers ---- */

typedef struct trainer {
    td_train *train;
    td_ddp_link *ddp;
    td_shard_link *shard;
} trainer;

static td_train_config config_of(const cell *c)
{
    const td_model_size size =
        on_gpu() ? (td_model_size){32, 64, LAYERS, 2, VOCAB} : (td_model_size){12, 20, LAYERS, 2, VOCAB};

    return (td_train_config){.model = {.size = size,
                                       .batch = BATCH,
                                       .context = CONTEXT,
                                       .precision = precisions[c->at[MASTERS]],
                                       .attention = "flash",
                                       .keep = c->at[KEEP] > 1 ? TD_KEEP_INPUTS : (td_keep)c->at[KEEP],
                                       .checkpoint_layers = c->at[KEEP] > 1 ? c->at[KEEP] - 1 : 0,
                                       .f32_gradients = c->at[MASTERS] == 3,
                                       .transient_gradients = c->at[TRANSIENT]},
                             .hyper = {.kind = (td_optimizer_kind)c->at[OPTIMIZER],
                                       .adamw = td_adamw_defaults(TD_ADAMW_TORCH),
                                       .sgd.lr = 0.5},
                             .time = c->at[UPDATE] ? TD_UPDATE_AFTER : TD_UPDATE_ALONG,
                             .update_sms = TD_UPDATE_ALL_SMS,
                             .gain = 1.0f / (float)info.ranks,
                             .micro_batches = micros_of(c),
                             .capture = c->at[CAPTURED]};
}

/* Sets other hyperparameters for the second half of the weights. The half begins inside a weight. */
static void add_groups(const cell *c, int64_t elements, td_train_config *config, td_optimizer_group groups[2])
{
    if (!c->at[GROUPS])
        return;
    groups[0] = (td_optimizer_group){{0, elements / 2 + 5}, config->hyper};
    groups[1] = (td_optimizer_group){{elements / 2 + 5, elements}, config->hyper};
    groups[1].hyper.adamw.weight_decay = 0;
    groups[1].hyper.sgd.lr = 0.1;
    config->groups = groups;
    config->group_count = 2;
}

static td_weights weights_of(const td_train *train)
{
    td_weights weights;

    td_assert_ok(td_transformer_weights(td_train_model(train), &weights));
    return weights;
}

static int64_t elements_of(const td_train_config *config)
{
    td_transformer_bytes bytes;

    td_assert_ok(td_transformer_plan(dev, &config->model, &bytes));
    return (int64_t)(bytes.parameters / td_dtype_size(td_precision_weights(config->model.precision)));
}

/* Bytes of the arena by masters, by what is kept, and by mode (one micro-batch, transient gradients, several
 * micro-batches). The arena is the plan's gradients, activations and scratch, for the model on a CPU. */
static const size_t arenas[][4][3] = {
    {{161280, 147712, 161280}, {172032, 157440, 172032}, {152064, 148736, 152064}, {162048, 153088, 162048}},
    {{148224, 140800, 148224}, {155648, 147456, 155648}, {142848, 140800, 142848}, {149248, 144128, 149248}},
    {{150784, 143104, 163328}, {158208, 149760, 170752}, {144896, 142592, 157440}, {151552, 146176, 164096}},
    {{163328, 150784, 163328}, {170752, 155392, 170752}, {157440, 154368, 157440}, {164096, 154880, 164096}}};

static int64_t allocations(void)
{
    td_memory_stats memory;

    td_assert_ok(td_device_memory(dev, &memory));
    return memory.allocations;
}

/* The device's memory must be what the plan says, and the arena must not be larger than in the table. */
static void check_bytes(const cell *c, const td_train_config *config, size_t before)
{
    const int mode = c->at[TRANSIENT] && c->at[SPLIT] != FULL ? 1 : c->at[MICRO] > 0 ? 2 : 0;
    td_memory_stats memory;
    td_train_bytes plan;
    td_train_config as_queued = *config;

    as_queued.capture = false; /* a CPU refuses a plan with graphs, except the simulated ones */
    td_assert_ok(td_train_plan(dev, &as_queued, &plan));
    td_assert_ok(td_device_memory(dev, &memory));
    const size_t arena = plan.model.gradients + plan.model.activations + plan.model.scratch;
    assert_int_equal(memory.current_bytes - before,
                     plan.model.parameters + arena + plan.optimizer + plan.step);
    if (!on_gpu() && arena > arenas[c->at[MASTERS]][c->at[KEEP]][mode])
        fail_msg("the arena has %zu bytes, at most %zu", arena, arenas[c->at[MASTERS]][c->at[KEEP]][mode]);
}

static trainer open_trainer(const cell *c)
{
    static const double sizes[VALUES] = {[BUCKETED] = 0.004, [SMALL_BUCKETS] = 0.002};
    const int split = c->at[SPLIT];
    td_train_config config = config_of(c);
    td_optimizer_group groups[2];
    td_memory_stats memory;
    trainer t = {.train = NULL};

    add_groups(c, elements_of(&config), &config, groups);
    if (split != NONE)
        config.gain = 0; /* the link makes it the average */
    if (split >= NAIVE && split <= TENSORS) {
        const td_ddp_strategy strategy = split == TENSORS ? TD_DDP_FLAT : (td_ddp_strategy)(split - NAIVE);

        td_assert_ok(td_ddp_link_create(comm, strategy, sizes[split], &t.ddp));
        config.hooks = td_ddp_link_hook(t.ddp);
    }
    if (split >= TENSORS) {
        const td_shard_options options = {.kind = split == TENSORS ? TD_SHARD_TENSORS
                                                  : split == FULL  ? TD_SHARD_FULL
                                                                   : TD_SHARD_FLAT,
                                          .bucket_mb = sizes[split],
                                          .prefetch = 1 + c->at[OPTIMIZER],
                                          .keep_weights = c->at[GROUPS],
                                          .reduce_last = c->at[MICRO]}; /* one reduction per step */

        td_assert_ok(td_shard_link_create(comm, &options, &config, &config, &t.shard));
    }
    td_assert_ok(td_device_memory(dev, &memory));
    if (config.capture && !on_gpu())
        td_as_if_gpu_once();
    td_assert_ok(td_train_create(dev, &config, &t.train));
    check_bytes(c, &config, memory.current_bytes);
    td_assert_ok(td_train_init(t.train, 7 + (uint64_t)(split == NONE || split == FULL ? 0 : info.rank)));
    if (t.ddp)
        td_assert_ok(td_ddp_link_attach(t.ddp, dev, t.train));
    const bool side = split == FULL && c->at[PARTS] && !on_gpu();
    if (side) /* reductions are waited for on another stream */
        td_as_if_gpu_once();
    if (t.shard)
        td_assert_ok(td_shard_link_attach(t.shard, dev, t.train));
    assert_true(!side || t.shard->full.reductions.side);
    if (t.ddp)
        td_ddp_link_container(t.ddp)->sms = 0; /* GEMMs have all SMs */
    if (t.shard)
        t.shard->sms = 0;
    return t;
}

static void close_trainer(trainer *t)
{
    td_train_destroy(t->train);
    td_ddp_link_destroy(t->ddp);
    td_shard_link_destroy(t->shard);
}

/* Returns a rank's tokens of a step's micro-batches, on the device. td_device_free frees them. */
static int64_t *tokens_of(const char *what, int step, int rank)
{
    const size_t bytes = MICROS * BATCH * CONTEXT * sizeof(int64_t);
    char name[64];
    void *block;

    snprintf(name, sizeof name, "matrix %s %d", what, step);
    int64_t *tokens = td_draw_tokens(name, (uint64_t)rank, MICROS * BATCH * CONTEXT, VOCAB);
    td_assert_ok(td_device_alloc(dev, bytes, &block));
    td_assert_ok(td_device_upload(dev, block, tokens, bytes));
    td_fence_free(tokens);
    return block;
}

static void backward_in_parts(const cell *c, td_train *train, const int64_t *ids, const int64_t *targets)
{
    for (int64_t micro = 0; micro < micros_of(c); micro++) {
        const int64_t at = micro * BATCH * CONTEXT;

        td_assert_ok(td_train_load(train, ids + at, targets + at, BATCH, CONTEXT));
        td_assert_ok(td_train_forward(train, NULL));
        td_assert_ok(td_train_backward(train));
    }
}

static float loss_of(td_train *train)
{
    float loss = -1;

    td_assert_ok(td_train_loss(train, &loss));
    return loss;
}

/* ---- the expected results ---- */

typedef struct arrays {
    void *numbers, *grads; /* of all weights, on the host */
} arrays;

typedef struct truth {
    bool known;
    td_weights w;        /* types and elements */
    float losses[STEPS]; /* losses of this rank */
    void *logits;        /* logits of an evaluation after step 2 */
    arrays after[STEPS];
} truth;

static truth truths[VALUES][2][2][2]; /* indices: masters, micro-batches, optimizer, groups */

/* Returns a copy of the device's data on the host. */
static void *here(const void *data, int64_t elements, td_dtype dtype)
{
    const size_t bytes = (size_t)elements * td_dtype_size(dtype);
    void *host = malloc(bytes);

    assert_non_null(host);
    td_assert_ok(td_device_download(dev, host, data, bytes));
    return host;
}

/* Returns the logits of a batch that is equal on all ranks, without a step. */
static void *evaluate(td_train *train, td_precision precision)
{
    int64_t *ids = tokens_of("evaluation", 0, 0);
    const void *logits;

    td_assert_ok(td_train_load(train, ids, ids, BATCH, CONTEXT));
    td_assert_ok(td_train_forward(train, &logits));
    td_assert_ok(td_device_free(dev, ids));
    return here(logits, (int64_t)BATCH * CONTEXT * VOCAB, td_precision_dtype(precision));
}

static void *scratch; /* memory on the device for any parameter */
enum { SCRATCH_BYTES = 32 * 1024 };

/* Gathers the weights of all ranks. Between weights are zeros. */
static void *gather_numbers(const trainer *t)
{
    td_transformer *const model = td_train_model(t->train);
    const td_weights w = weights_of(t->train);
    const size_t size = td_dtype_size(w.dtype);
    char *numbers = calloc((size_t)w.elements, size);
    td_parameter p;

    assert_non_null(numbers);
    for (int64_t i = 0; i < td_transformer_parameter_count(model); i++) {
        td_assert_ok(td_transformer_parameter(model, i, &p));
        assert_true((size_t)p.numel * size <= SCRATCH_BYTES);
        td_assert_ok(td_shard_gather(t->shard, i, scratch));
        td_assert_ok(
            td_device_download(dev, numbers + (size_t)p.offset * size, scratch, (size_t)p.numel * size));
    }
    return numbers;
}

static bool is_full(const trainer *t)
{
    return t->shard && t->shard->split.kind == TD_SHARD_FULL;
}

static void *read_numbers(const trainer *t)
{
    const td_weights w = weights_of(t->train);

    if (is_full(t))
        return gather_numbers(t);
    void *const params = here(w.params, w.elements, w.dtype), *const numbers = td_numbers_in_copy(
                                                                  &w, params, 0, w.elements);
    free(params);
    return numbers;
}

static arrays read_arrays(const trainer *t)
{
    const td_weights w = weights_of(t->train);

    return (arrays){.numbers = read_numbers(t), .grads = here(w.grads, w.elements, w.grad_dtype)};
}

static void free_arrays(arrays *a)
{
    free(a->numbers);
    free(a->grads);
}

/* Replaces the gradients of all ranks' trainers by their sum. */
static void add_up(td_train *trains[MOST_RANKS])
{
    const td_weights w = weights_of(trains[0]);
    void *sum = here(w.grads, w.elements, w.grad_dtype);

    for (int rank = 1; rank < info.ranks; rank++) {
        void *more = here(weights_of(trains[rank]).grads, w.elements, w.grad_dtype);

        td_ranks_add(w.grad_dtype, w.elements, more, sum);
        free(more);
    }
    for (int rank = 0; rank < info.ranks; rank++)
        td_assert_ok(td_device_upload(dev, weights_of(trains[rank]).grads, sum,
                                      (size_t)w.elements * td_dtype_size(w.grad_dtype)));
    free(sum);
}

static const truth *truth_of(const cell *c)
{
    truth *const t = &truths[c->at[MASTERS]][c->at[MICRO]][c->at[OPTIMIZER]][c->at[GROUPS]];
    const cell plain = {.at = {[KEEP] = TD_KEEP_ALL,
                               [MICRO] = c->at[MICRO],
                               [PARTS] = 1,
                               [UPDATE] = 1,
                               [OPTIMIZER] = c->at[OPTIMIZER],
                               [GROUPS] = c->at[GROUPS],
                               [MASTERS] = c->at[MASTERS]}};
    trainer all[MOST_RANKS];
    td_train *trains[MOST_RANKS];

    if (t->known)
        return t;
    for (int rank = 0; rank < info.ranks; rank++) {
        all[rank] = open_trainer(&plain);
        trains[rank] = all[rank].train;
    }
    t->w = weights_of(trains[0]);
    for (int step = 0; step < STEPS; step++) {
        for (int rank = 0; rank < info.ranks; rank++) {
            int64_t *ids = tokens_of("ids", step, rank), *targets = tokens_of("targets", step, rank);

            backward_in_parts(&plain, trains[rank], ids, targets);
            td_assert_ok(td_device_free(dev, ids));
            td_assert_ok(td_device_free(dev, targets));
        }
        t->losses[step] = loss_of(trains[info.rank]);
        add_up(trains);
        for (int rank = 0; rank < info.ranks; rank++)
            td_assert_ok(td_train_update(trains[rank]));
        t->after[step] = read_arrays(&all[0]);
        if (step == 2)
            t->logits = evaluate(trains[0], precisions[c->at[MASTERS]]);
    }
    for (int rank = 0; rank < info.ranks; rank++)
        close_trainer(&all[rank]);
    t->known = true;
    return t;
}

/* ---- a cell ---- */

static double tolerance(const cell *c)
{
    return info.ranks <= 2 ? 0 : c->at[MASTERS] == 0 ? 1e-4 : 3e-2;
}

static void compare(const char *what, const cell *c, td_dtype dtype, const void *got, const void *want,
                    int64_t count)
{
    double *const truth = td_as_f64(dtype, want, count);

    if (info.ranks <= 2)
        td_assert_identical(what, dtype, got, want, count);
    else
        td_assert_close(what, dtype, got, truth, count, tolerance(c));
    free(truth);
}

static void compare_range(const cell *c, const trainer *t, const truth *truth, td_range range,
                          const char *want)
{
    const td_weights w = weights_of(t->train);
    td_master master;

    for (int64_t at = range.begin; at < range.end; at = master.end) {
        master = td_weights_master(&w, at);
        const int64_t count = (master.end < range.end ? master.end : range.end) - at;
        void *const got = here(master.grad, count, w.grad_dtype);

        compare("gradients", c, truth->w.grad_dtype, got, want + (size_t)at * td_dtype_size(w.grad_dtype),
                count);
        free(got);
    }
}

/* Compares this rank's gradients. If a rank has parts of buckets or units, only its parts are compared. */
static void compare_gradients(const cell *c, const trainer *t, const truth *truth, const void *want)
{
    const td_range all = {0, truth->w.elements};
    const bool parts = t->shard && t->shard->split.kind != TD_SHARD_TENSORS;

    if (!parts)
        compare_range(c, t, truth, all, want);
    for (int64_t i = 0; parts && i < t->shard->split.piece_count; i++) {
        compare_range(c, t, truth, t->shard->split.pieces[i].own, want);
        compare_range(c, t, truth, t->shard->split.pieces[i].rest, want);
    }
}

static void compare_with(const cell *c, const trainer *t, const truth *truth, int step)
{
    const arrays *const want = &truth->after[step];

    td_assert_ok(td_train_settle(t->train));
    void *const got = read_numbers(t);
    compare("weights", c, truth->w.dtype, got, want->numbers, truth->w.elements);
    if (!c->at[TRANSIENT])
        compare_gradients(c, t, truth, want->grads);
    free(got);
}

/* A step, whole or in parts. In parts, every second step calls td_train_settle before its update. The update
 * then makes weights that not all ranks have. */
static void run_step(const cell *c, td_train *train, int step)
{
    int64_t *ids = tokens_of("ids", step, info.rank), *targets = tokens_of("targets", step, info.rank);

    if (c->at[PARTS]) {
        backward_in_parts(c, train, ids, targets);
        if (step % 2 == 1)
            td_assert_ok(td_train_settle(train));
        if (c->at[UPDATE])
            td_assert_ok(td_train_update(train));
    } else {
        td_assert_ok(td_train_step(train, ids, targets, BATCH, CONTEXT));
    }
    td_assert_ok(td_device_free(dev, ids));
    td_assert_ok(td_device_free(dev, targets));
}

/* With simulated graphs a step is computed when it is captured, and a replay does nothing. */
static void run_cell(const cell *c)
{
    const int steps = c->at[CAPTURED] && !on_gpu() ? AS_IF_STEPS : STEPS;
    const truth *const truth = truth_of(c);
    trainer t = open_trainer(c);
    int64_t first = 0, count;

    (void)td_as_if_launches();
    for (int step = 0; step < steps; step++) {
        run_step(c, t.train, step);
        if (fabsf(loss_of(t.train) - truth->losses[step]) > (float)tolerance(c) * truth->losses[step])
            fail_msg("step %d: the loss is %.9g, needs to be %.9g", step, (double)loss_of(t.train),
                     (double)truth->losses[step]);
        td_assert_ok(td_train_steps(t.train, &count));
        assert_int_equal(count, step + 1);
        if (step == 0)
            compare_with(c, &t, truth, step);
        if (step == 1 && t.shard)
            td_assert_ok(td_shard_link_finish(t.shard));
        if (step == 1)
            first = allocations();
        if (step == 2) {
            void *logits = evaluate(t.train, precisions[c->at[MASTERS]]);

            compare("logits", c, td_precision_dtype(precisions[c->at[MASTERS]]), logits, truth->logits,
                    (int64_t)BATCH * CONTEXT * VOCAB);
            free(logits);
        }
    }
    compare_with(c, &t, truth, steps - 1);
    if (c->at[CAPTURED] && !on_gpu())
        assert_true(td_as_if_launches() >= micros_of(c));
    /* Only the tokens of the third step and of the evaluation are allocated: the trainer allocates
     * nothing. */
    assert_int_equal(allocations() - first, steps == STEPS ? 2 + 1 : 0);
    close_trainer(&t);
}

/* The cell that runs, or the cell that failed. */
static cell now;
static bool failing;

static int say_which(void **unused)
{
    (void)unused;
    if (failing)
        fprintf(stderr, "in the cell: %s\n", name_of(&now));
    return 0;
}

static int run(const cell *c)
{
    now = *c;
    failing = true; /* stays true if the cell fails, because the call then does not return */
    run_cell(&now);
    failing = false;
    return 1;
}

TD_BODY(every_pair_of_options_has_the_same_bits)
{
    cell c;
    int count = 0;

    while (next_by_pairs(&c))
        count += run(&c);
    for (int number = 0; number < product() && info.ranks == 1; number++) {
        c = cell_of(number);
        if (possible(&c) && c.at[SPLIT] == NONE && c.at[GROUPS] == 0)
            count += run(&c);
    }
    printf("%d cells of %d\n", count, product());
    assert_true(count >= values_of(SPLIT) * values_of(MASTERS) / 2);
}

static int seconds; /* every cell is tested for so many seconds */

/* All ranks agree on the end, by rank 0's clock. */
static bool time_is_left(int64_t deadline_ns)
{
    const bool mine = td_clock_ns() < deadline_ns;
    bool all[MOST_RANKS];

    td_assert_ok(td_comm_exchange(comm, &mine, sizeof mine, all));
    return all[0];
}

TD_BODY(every_cell_has_the_same_bits)
{
    const char *const seed = getenv("TANDEM_FUZZ_SEED");
    const int64_t deadline = td_clock_ns() + seconds * INT64_C(1000000000);
    int count = 0;

    const int first = (int)(strtoul(seed ? seed : "1", NULL, 10) % (unsigned)product());
    for (int i = 0; i < product() && time_is_left(deadline); i++) {
        /* 7919 is a prime, so that every cell comes once */
        const cell c = cell_of((int)(((int64_t)i * 7919 + first) % product()));

        if (possible(&c))
            count += run(&c);
    }
    printf("%d cells of %d\n", count, product());
}

/* Other sequences with as many tokens in all are queued, not replayed. */
TD_BODY(a_graph_is_of_one_shape)
{
    const cell c = {.at = {[CAPTURED] = 1}};
    const td_train_config config = config_of(&c);
    td_train *train;

    if (on_gpu())
        skip();
    int64_t *ids = tokens_of("shapes", 0, 0);
    td_as_if_gpu_once();
    td_assert_ok(td_train_create(dev, &config, &train));
    td_assert_ok(td_train_init(train, 7));
    for (int i = 0; i < 2; i++)
        td_assert_ok(td_train_step(train, ids, ids, BATCH, CONTEXT / 2));
    assert_true(td_as_if_launches() > 0);
    td_assert_ok(td_train_step(train, ids, ids, BATCH / 2, CONTEXT));
    assert_int_equal(td_as_if_launches(), 0);
    td_train_destroy(train);
    td_assert_ok(td_device_free(dev, ids));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_graph_is_of_one_shape),
        cmocka_unit_test_teardown(every_pair_of_options_has_the_same_bits, say_which),
        cmocka_unit_test_teardown(every_cell_has_the_same_bits, say_which),
    };
    const char *const drawn = getenv("TANDEM_FUZZ_SECONDS");
    const bool all = argc > 3;
    td_comm_backend backend;
    int result;

    if (all)
        seconds = atoi(drawn ? drawn : argv[3]);
    td_as_if_graphs();
    if (all && !td_ranks_inside() && td_ranks_possible(argc, argv, &backend, &result))
        return td_ranks_run(argc, argv, atoi(argv[2]), seconds + 100);
    if (!td_ranks_begin(argc, argv, &dev, &comm, &result))
        return result;
    td_assert_ok(td_comm_describe(comm, &info));
    if (info.ranks > MOST_RANKS) {
        fprintf(stderr, "test_matrix: %d ranks, needs 1 to %d\n", info.ranks, MOST_RANKS);
        return td_ranks_end(dev, comm, 1);
    }
    td_assert_ok(td_cpu_set_threads(1)); /* there are as many ranks as processors */
    td_assert_ok(td_device_alloc(dev, SCRATCH_BYTES, &scratch));
    const int failed = td_run_group(argv[1], all ? 1 : 2, &tests[all ? 2 : 0], NULL, NULL);
    for (int i = 0; i < VALUES * 8; i++)
        for (int step = 0; step < STEPS; step++)
            free_arrays(&((truth *)truths)[i].after[step]);
    for (int i = 0; i < VALUES * 8; i++)
        free(((truth *)truths)[i].logits);
    td_assert_ok(td_device_free(dev, scratch));
    return td_ranks_end(dev, comm, failed);
}
