/* Random walks through the states of a trainer and its twin. */
#include "support/fuzz_api_train.h"
#include "support/weights.h"

/* A trainer, its twin, and the calls that both have had. */
typedef struct pair {
    td_train_config config;
    td_device *dev[2];
    td_train *train[2];
    int64_t micros, turn, batch, seq;
    int64_t step_batch, step_seq; /* of the step's first micro-batch */
    bool loaded, loss, final;
    bool any_loss;     /* there is a loss to read */
    int64_t gradients; /* the number of times since init that the gradients of a whole step were computed */
} pair;

/* A step of the walk. It is drawn once, and the trainer and its twin both take it. */
typedef struct step {
    enum { STEP, LOAD, FORWARD, BACKWARD, UPDATE, SET, INIT, RESET, STEPS } kind;
    api_batch b;
    td_hyperparameters hyper;
    uint64_t seed;
} step;

static const char *const step_names[] = {"step",   "load", "forward", "backward",
                                         "update", "set",  "init",    "reset"};

static td_status take(const pair *p, int which, const step *s, const void **logits)
{
    td_train *train = p->train[which];

    switch (s->kind) {
    case STEP:
        return td_train_step(train, s->b.ids, s->b.targets, s->b.batch, s->b.seq);
    case LOAD:
        return td_train_load(train, s->b.ids, s->b.targets, s->b.batch, s->b.seq);
    case FORWARD:
        return td_train_forward(train, logits);
    case BACKWARD:
        return td_train_backward(train);
    case UPDATE:
        return td_train_update(train);
    case SET:
        return td_train_set(train, &s->hyper);
    case INIT:
        return td_train_init(train, s->seed);
    default:
        return td_train_reset(train);
    }
}

static void draw_step(const pair *p, step *s)
{
    const bool loss = p->config.until != TD_TRAIN_FORWARD;

    *s = (step){.kind = td_fuzz_chance(70) ? LOAD + td_fuzz_below(4) : td_fuzz_below(STEPS),
                .seed = td_fuzz_bits()};
    if (s->kind == STEP)
        s->b = api_draw_batch(&p->config, p->micros, true);
    if (s->kind == LOAD)
        s->b = api_draw_batch(&p->config, 1, false);
    if (s->kind == SET)
        s->hyper = api_draw_set(&p->config);
    if ((s->kind == FORWARD || s->kind == BACKWARD) && !p->loaded)
        impossible(TD_BAD_STATE, "batch");
    if (s->kind == BACKWARD && p->loaded && p->turn > 0 &&
        (p->batch != p->step_batch || p->seq != p->step_seq))
        impossible(TD_BAD_ARGUMENT, "micro-batch");
    else if (s->kind == BACKWARD && !(loss && p->loss))
        impossible(TD_BAD_STATE, "loss|gradients|inference|forward");
    if (s->kind == UPDATE && !p->final)
        impossible(TD_BAD_STATE, "gradients|optimizer");
}

static void after_backward(pair *p)
{
    const bool last = p->turn == p->micros - 1;

    p->loss = false;
    p->final = last && p->config.until == TD_TRAIN_UPDATE && p->config.time == TD_UPDATE_AFTER;
    p->gradients += last;
    p->turn = last ? 0 : p->turn + 1;
}

static void after_step(pair *p, const step *s)
{
    const bool loss = p->config.until != TD_TRAIN_FORWARD;

    switch (s->kind) {
    case STEP:
        p->turn = p->micros - 1;
        p->any_loss |= loss;
        after_backward(p);
        p->final = false;
        p->loaded = true;
        break;
    case LOAD:
        p->loaded = true;
        break;
    case FORWARD:
        p->loss = loss;
        p->any_loss |= loss;
        p->final = false;
        break;
    case BACKWARD:
        if (p->turn == 0)
            p->step_batch = p->batch, p->step_seq = p->seq;
        after_backward(p);
        break;
    case UPDATE:
        p->final = false;
        break;
    case INIT:
        p->loss = false;
        p->turn = p->gradients = 0;
        p->final = false;
        break;
    case RESET:
        p->turn = p->gradients = 0;
        p->final = false;
        break;
    default:
        break;
    }
    if (s->kind == STEP || s->kind == LOAD)
        p->batch = s->b.batch, p->seq = s->b.seq;
}

/* After a refused call the two trainers may be in different states, and a refused backward starts the
 * micro-batches again. A whole step makes both equal. */
static void begin_again(pair *p, const step *s)
{
    int64_t ids[3 * TOKENS] = {1, 2, 3};
    const step whole = {.kind = STEP, .b = {.ids = ids, .targets = ids, .batch = 1, .seq = 2}};

    if (s->kind != STEP && s->kind != BACKWARD)
        return;
    for (int i = 0; i < 2; i++)
        td_assert_ok(take(p, i, &whole, NULL));
    after_step(p, &whole);
}

static void check_equal(const pair *p)
{
    float losses[2] = {0};
    int64_t steps[2];

    for (int i = 0; i < 2; i++) {
        if (p->any_loss)
            td_assert_ok(td_train_loss(p->train[i], &losses[i]));
        td_assert_ok(td_train_steps(p->train[i], &steps[i]));
    }
    assert_memory_equal(&losses[0], &losses[1], sizeof losses[0]);
    assert_true(steps[0] == steps[1] && steps[0] <= p->gradients);
    for (int64_t i = 0; i < td_transformer_parameter_count(td_train_model(p->train[0])); i++) {
        td_parameter of[2];
        float *m[2], *v[2];

        for (int k = 0; k < 2; k++) {
            td_assert_ok(td_transformer_parameter(td_train_model(p->train[k]), i, &of[k]));
            if (p->config.until == TD_TRAIN_UPDATE)
                td_assert_ok(
                    td_optimizer_moments(td_train_optimizer(p->train[k]), of[k].offset, &m[k], &v[k]));
            else
                m[k] = v[k] = NULL;
        }
        void *numbers[2];
        for (int k = 0; k < 2; k++)
            numbers[k] = td_numbers_of(td_train_model(p->train[k]), i);
        td_assert_identical(of[0].name, of[0].dtype, numbers[0], numbers[1], of[0].numel);
        free(numbers[0]);
        free(numbers[1]);
        if (m[0]) {
            td_assert_identical("exp_avg", TD_F32, m[0], m[1], of[0].numel);
            td_assert_identical("exp_avg_sq", TD_F32, v[0], v[1], of[0].numel);
        }
    }
}

static void open_pair(pair *p)
{
    p->config = api_good_train();
    p->micros = api_micros_of(&p->config);
    for (int i = 0; i < 2; i++) {
        td_assert_ok(td_device_open("cpu", &p->dev[i]));
        td_assert_ok(td_train_create(p->dev[i], &p->config, &p->train[i]));
        td_assert_ok(td_train_init(p->train[i], 3));
    }
}

void api_walk_train(void)
{
    pair p = {.turn = 0};
    char walked[512] = "";

    open_pair(&p);
    for (int64_t left = 10 + td_fuzz_below(30); left > 0; left--) {
        const void *logits[2] = {0};
        step s;

        api_begin();
        draw_step(&p, &s);
        snprintf(walked + strlen(walked), sizeof walked - strlen(walked), " %s", step_names[s.kind]);
        td_fuzz_describe("walk: %s %s until %d kind %d time %d clip %g micros %d:%s",
                         td_precision_name(p.config.model.precision), p.config.model.attention,
                         (int)p.config.until, (int)p.config.hyper.kind, (int)p.config.time,
                         (double)p.config.clip, (int)p.micros, walked);
        const td_status status = take(&p, 0, &s, &logits[0]);
        api_judge(step_names[s.kind], status);
        if (status == TD_OK) {
            td_assert_ok(take(&p, 1, &s, &logits[1]));
            after_step(&p, &s);
            if (logits[0])
                td_assert_identical("logits", td_precision_dtype(p.config.model.precision), logits[0],
                                    logits[1], p.batch * p.seq * VOCAB);
        } else {
            snprintf(walked + strlen(walked), sizeof walked - strlen(walked), "(refused)");
            begin_again(&p, &s);
        }
        check_equal(&p);
    }
    for (int i = 0; i < 2; i++) {
        td_train_destroy(p.train[i]);
        td_device_close(p.dev[i]);
    }
}
