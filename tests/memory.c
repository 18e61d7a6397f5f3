/* Recordings of passes: events add up, and the totals agree with the accounting. */
#include "memory/memory.h"

#include "accounting/accounting.h"
#include "base/rng.h"
#include "memory/recording.h"
#include "support/cases.h"
#include "support/compare.h"
#include "support/gpu.h"
#include "support/test.h"

#define TEST_DEVICE MEMORY_DEVICE
#include "support/one_device.h"

static const td_precision precisions[] = {TD_PRECISION_F32, TD_PRECISION_BF16_MIXED};
static const char *const attentions[] = {"naive", "flash"};
static const td_keep keeps[] = {TD_KEEP_MOST, TD_KEEP_ALL, TD_KEEP_INPUTS, TD_KEEP_ATTENTION};

static const td_memory_config tiny = {
    .model = {.size = {.d_model = 24, .d_ff = 40, .layers = 3, .heads = 3, .vocab = 41},
              .batch = 2,
              .context = 9,
              .precision = TD_PRECISION_F32,
              .attention = "flash",
              .keep = TD_KEEP_ALL},
    .pass = TD_MEMORY_STEP,
    .time = TD_UPDATE_AFTER};

static td_memory_recording *record(const td_memory_config *config)
{
    td_memory_recording *recording;

    td_assert_ok(td_memory_record(dev, config, &recording));
    return recording;
}

static td_memory_summary summary_of(const td_memory_recording *recording)
{
    td_memory_summary summary;

    td_assert_ok(td_memory_summary_of(recording, &summary));
    return summary;
}

static int64_t parameters_of(const td_memory_config *config)
{
    const td_model_size *size = &config->model.size;
    td_account_parameters parameters;

    td_assert_ok(td_account_model_parameters(
        &(td_account_model){size->d_model, size->d_ff, size->layers, size->heads, size->vocab}, &parameters));
    return parameters.total;
}

/* ---- events add up ---- */

static bool within(const td_memory_event *tensor, const td_memory_event *block)
{
    const char *at = tensor->address, *begin = block->address;

    return at >= begin && at + tensor->bytes <= begin + block->bytes;
}

static bool overlap(const td_memory_event *a, const td_memory_event *b)
{
    const char *x = a->address, *y = b->address;

    return x < y + b->bytes && y < x + a->bytes;
}

/* If a tensor becomes live, it must lie in a live block and overlap no other live tensor. */
static void check_place(const td_memory_entry *entries, int64_t i)
{
    bool housed = false;

    for (int64_t j = 0; j < i; j++) {
        const td_memory_entry *other = &entries[j];

        if (other->pair >= 0 && other->pair <= i)
            continue;
        if (other->event.action == TD_MEMORY_ALLOC)
            housed |= within(&entries[i].event, &other->event);
        if (other->event.action == TD_MEMORY_LIVE && overlap(&entries[i].event, &other->event))
            fail_msg("%s and %s share memory", entries[i].event.label, other->event.label);
    }
    if (!housed)
        fail_msg("%s lies in no block", entries[i].event.label);
}

/* Replays the events without the recording. The totals must be the recording's and the device's. */
static void check_totals(const td_memory_recording *recording, size_t device_peak)
{
    const td_memory_summary summary = summary_of(recording);
    const td_memory_entry *entries;
    size_t allocated = 0, peak = 0, planned = 0;
    size_t blocks[TD_MEMORY_CATEGORIES] = {0};
    int64_t count;

    td_assert_ok(td_memory_entries(recording, &entries, &count));
    assert_int_equal(count, summary.entries);
    for (int64_t i = 0; i < count; i++) {
        const td_memory_entry *entry = &entries[i];
        const td_memory_event *event = &entry->event;

        td_in_case("entry %d of %s", (int)i, event->label);
        assert_int_equal(event->sequence, i);
        assert_true(i == 0 ||
                    (event->time_ns >= entries[i - 1].event.time_ns && entry->phase >= entries[i - 1].phase));
        if (event->action == TD_MEMORY_ALLOC) {
            allocated += event->bytes;
            blocks[entry->category] += event->bytes;
        }
        if (event->action == TD_MEMORY_FREE)
            allocated -= event->bytes;
        if (event->action == TD_MEMORY_LIVE)
            check_place(entries, i);
        if (event->action == TD_MEMORY_DEAD) {
            assert_true(entry->pair >= 0 && entries[entry->pair].pair == i);
            assert_int_equal(entries[entry->pair].category, entry->category);
        }
        assert_int_equal(event->current_bytes, allocated + summary.base_bytes);
        peak = allocated > peak ? allocated : peak;
    }
    assert_int_equal(peak, summary.peak_bytes);
    assert_int_equal(peak, device_peak);
    for (int i = 0; i < TD_MEMORY_CATEGORIES; i++) {
        if (i <= TD_MEMORY_OPTIMIZER_STATE && blocks[i] > 0) /* transient gradients share a block */
            assert_int_equal(blocks[i], summary.allocated[i]);
        planned += summary.allocated[i];
    }
    assert_true(blocks[TD_MEMORY_WEIGHTS] > 0 && blocks[TD_MEMORY_ACTIVATIONS] > 0);
    assert_int_equal(planned, peak);
}

/* Phases follow each other, and each phase has its own peak. */
static void check_phases(const td_memory_recording *recording, const td_memory_config *config)
{
    const td_memory_summary summary = summary_of(recording);
    const td_memory_entry *entries;
    int64_t count, end = 0;

    td_assert_ok(td_memory_entries(recording, &entries, &count));
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        const td_memory_span *span = &summary.phases[phase];
        const bool there = phase <= (config->pass < TD_MEMORY_STEP     ? TD_MEMORY_IN_FORWARD
                                     : config->time == TD_UPDATE_AFTER ? TD_MEMORY_IN_OPTIMIZER
                                                                       : TD_MEMORY_IN_BACKWARD);

        td_in_case("phase %s", td_memory_phase_name((td_memory_phase)phase));
        assert_int_equal(span->first, end);
        assert_int_equal(span->end > span->first, there);
        assert_int_equal(span->end_ns > 0, there);
        end = span->end;
        if (!there)
            continue;
        for (int64_t i = span->first; i < span->end; i++)
            assert_int_equal(entries[i].phase, phase);
    }
    assert_int_equal(end, count);
}

static size_t live_of(const td_memory_recording *recording, td_memory_category category, int64_t until)
{
    const td_memory_entry *entries;
    int64_t count;
    size_t bytes = 0;

    td_assert_ok(td_memory_entries(recording, &entries, &count));
    for (int64_t i = 0; i < until; i++)
        if (entries[i].event.action == TD_MEMORY_LIVE && entries[i].category == category &&
            (entries[i].pair < 0 || entries[i].pair >= until))
            bytes += entries[i].event.bytes;
    return bytes;
}

/* The bytes of weights, gradients and moments must follow from the number of parameters. */
static void check_categories(const td_memory_recording *recording, const td_memory_config *config)
{
    const td_memory_summary summary = summary_of(recording);
    const size_t numel = (size_t)parameters_of(config),
                 product = td_dtype_size(td_precision_dtype(config->model.precision));
    const int64_t created = summary.phases[TD_MEMORY_IN_CREATE].end,
                  forward = summary.phases[TD_MEMORY_IN_FORWARD].end,
                  backward = summary.phases[TD_MEMORY_IN_BACKWARD].end;
    const bool step = config->pass == TD_MEMORY_STEP, held = step && config->time == TD_UPDATE_AFTER;

    assert_int_equal(live_of(recording, TD_MEMORY_WEIGHTS, created), numel * 4);
    assert_int_equal(live_of(recording, TD_MEMORY_WEIGHTS, summary.entries), numel * 4);
    assert_int_equal(live_of(recording, TD_MEMORY_OPTIMIZER_STATE, created), step ? numel * 8 : 0);
    /* the loss and its rows */
    assert_int_equal(live_of(recording, TD_MEMORY_ACTIVATIONS, created) > 0, true);
    /* The backward pass begins with the gradients of the norms. */
    const size_t norms = step ? 2 * (size_t)config->model.size.layers + 1 : 0;
    assert_int_equal(live_of(recording, TD_MEMORY_GRADIENTS, forward + (int64_t)norms),
                     norms * (size_t)config->model.size.d_model * product);
    assert_int_equal(live_of(recording, TD_MEMORY_GRADIENTS, backward), held ? numel * product : 0);
    assert_int_equal(live_of(recording, TD_MEMORY_GRADIENTS, summary.entries), 0);
    if (step)
        assert_true(summary.phases[TD_MEMORY_IN_BACKWARD].by_category[TD_MEMORY_ACTIVATIONS] > 0);
}

enum { OF_PASS, OF_ATTENTION, OF_PRECISION, OF_KEEP, OF_UPDATE, OF_GRADIENTS };

static td_memory_config config_of(const int *choice)
{
    td_memory_config config = tiny;

    config.pass = (td_memory_pass)choice[OF_PASS];
    config.model.attention = attentions[choice[OF_ATTENTION]];
    config.model.precision = precisions[choice[OF_PRECISION]];
    config.model.keep = keeps[choice[OF_KEEP]];
    config.time = choice[OF_UPDATE] ? TD_UPDATE_AFTER : TD_UPDATE_ALONG;
    config.model.transient_gradients = choice[OF_GRADIENTS] != 0;
    return config;
}

static void events_add_up(void **state)
{
    const td_memory_config config = config_of(((const td_combination *)*state)->choice);
    td_memory_stats before, after;

    td_assert_ok(td_device_memory(dev, &before));
    td_memory_recording *recording = record(&config);
    td_assert_ok(td_device_memory(dev, &after));
    assert_int_equal(after.live_blocks, before.live_blocks);
    assert_false(td_device_history_running(dev));
    check_totals(recording, after.peak_bytes - before.current_bytes);
    check_phases(recording, &config);
    check_categories(recording, &config);
    td_memory_recording_destroy(recording);
}

static const td_cases recordings = {.group = "events add up",
                                    .test = events_add_up,
                                    .axes = {{"inference", "forward", "step"},
                                             {"naive", "flash"},
                                             {"f32", "mixed"},
                                             {"most", "all", "inputs"},
                                             {"along", "after"},
                                             {"held", "transient"}}};

/* ---- contents of a recording ---- */

/* The tensors that a block saves have the bytes that accounting computes, with each tensor rounded up to
 * TD_ALIGNMENT. */
static void a_block_saves_what_accounting_says(void **state)
{
    const int *choice = ((const td_combination *)*state)->choice;
    td_memory_config config = tiny;
    td_memory_block block;
    td_account_block want;
    td_account_activations sizes;

    config.model.size = (td_model_size){.d_model = 64, .d_ff = 192, .layers = 3, .heads = 4, .vocab = 50};
    config.model.batch = 4;
    config.model.context = 64;
    config.pass = choice[0] ? TD_MEMORY_STEP : TD_MEMORY_FORWARD;
    config.model.attention = attentions[choice[1]];
    config.model.precision = precisions[choice[2]];
    config.model.keep = keeps[choice[3]];
    const int64_t element = choice[2] ? 2 : 4;
    const td_account_model model = {64, 192, 3, 4, 50};
    td_assert_ok(td_account_block_activations(&model, 4, 64, element, 4, choice[1] == 1, &want));
    td_assert_ok(td_account_model_activations(&model, 4, 64, element, &sizes));
    td_memory_recording *recording = record(&config);
    for (int64_t layer = 0; layer < 3; layer++) {
        td_in_case("layer %d", (int)layer);
        const int64_t saved[][2] = {[TD_KEEP_MOST] = {want.most, want.most},
                                    [TD_KEEP_ALL] = {want.all, want.all},
                                    [TD_KEEP_INPUTS] = {want.input, want.all},
                                    [TD_KEEP_ATTENTION] = {want.attention, want.most}};
        size_t sum = 0;
        char name[16];

        snprintf(name, sizeof name, "layers.%d.", (int)layer);
        td_assert_ok(td_memory_block_of(recording, layer, &block));
        assert_int_equal(block.saved_bytes, saved[config.model.keep][layer == 2]); /* the last checkpoint */
        assert_int_equal(block.residual_bytes, 4 * 64 * 64 * 4);
        assert_int_equal(block.scores_bytes, choice[1] == 1 ? 0 : sizes.scores);
        assert_int_equal(block.gradient_bytes,
                         choice[0] ? (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) * element : 0);
        for (int64_t i = 0; i < block.saved && i < TD_MEMORY_CONTRIBUTORS; i++) {
            assert_true(i == 0 || block.largest[i].bytes <= block.largest[i - 1].bytes);
            assert_int_equal(block.largest[i].category, TD_MEMORY_ACTIVATIONS);
            assert_ptr_equal(strstr(block.largest[i].name, name), block.largest[i].name);
            sum += block.largest[i].bytes;
        }
        assert_true(sum <= block.saved_bytes && (block.saved > 5 || sum == block.saved_bytes));
    }
    td_assert_refused(td_memory_block_of(recording, 3, &block), TD_BAD_ARGUMENT, "layer is 3, needs 0 to 2");
    td_memory_recording_destroy(recording);
}

static const td_cases blocks = {
    .group = "a block saves what accounting says",
    .test = a_block_saves_what_accounting_says,
    .axes = {{"forward", "step"}, {"naive", "flash"}, {"f32", "mixed"}, {"most", "all", "inputs"}}};

TD_TEST(the_largest_come_first)
{
    td_memory_config config = tiny;
    td_memory_tensor largest[100];
    int64_t count, few;

    td_memory_recording *recording = record(&config);
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++) {
        td_assert_ok(td_memory_largest(recording, (td_memory_phase)phase, 100, largest, &count));
        assert_in_range(count, phase == TD_MEMORY_IN_OPTIMIZER ? 0 : 5, 99);
        for (int64_t i = 0; i < count; i++) {
            td_in_case("phase %d, tensor %d", phase, (int)i);
            assert_int_equal(largest[i].phase, phase);
            assert_non_null(largest[i].label);
            assert_true(
                i == 0 || largest[i].bytes < largest[i - 1].bytes ||
                (largest[i].bytes == largest[i - 1].bytes && largest[i].entry > largest[i - 1].entry));
        }
        td_assert_ok(td_memory_largest(recording, (td_memory_phase)phase, 1, largest, &few));
        assert_int_equal(few, count < 1 ? count : 1);
    }
    td_assert_ok(td_memory_largest(recording, TD_MEMORY_IN_FORWARD, 100, largest, &count));
    int64_t at = 0; /* the scratch of attention may be larger, depending on the number of threads */
    while (at < count && strcmp(largest[at].name, "layers.*.ffn.gate_up") != 0)
        at++;
    assert_true(at < count);
    assert_string_equal(largest[at].label, "forward/layers.0/layers.0.ffn.gate_up");
    assert_int_equal(largest[at].count, 3);
    assert_int_equal(largest[at].category, TD_MEMORY_ACTIVATIONS);
    assert_in_range(largest[at].bytes, 2 * 9 * 80 * 4, 2 * 9 * 80 * 4 + 255);
    td_memory_recording_destroy(recording);
}

TD_TEST(owned_ranges_are_refused)
{
    td_memory_recording *recording = (td_memory_recording *)&recording;
    td_memory_config config = tiny;

    config.model.owned = &(td_range){0, 9};
    config.model.owned_count = 1;
    td_assert_refused(td_memory_record(dev, &config, &recording), TD_UNSUPPORTED, "model.owned is not NULL");
    assert_null(recording);
}

/* ---- invented recordings ---- */

enum { INVENTED = 4000 };

/* What is true after an entry; [0]: before the first. */
static struct {
    size_t live[TD_MEMORY_CATEGORIES], all, allocated;
} states[INVENTED + 1];

static void check_span(const td_memory_span *span, int64_t first, int64_t end)
{
    int64_t peak = first;
    size_t allocated = 0;

    for (int64_t i = first; i <= end; i++) {
        peak = states[i].all > states[peak].all ? i : peak;
        allocated = states[i].allocated > allocated ? states[i].allocated : allocated;
    }
    assert_int_equal(span->peak, peak == first ? -1 : peak - 1);
    assert_int_equal(span->live_bytes, states[peak].all);
    assert_int_equal(span->begin_bytes, states[first].all);
    assert_int_equal(span->end_bytes, states[end].all);
    assert_int_equal(span->allocated_bytes, allocated);
    for (int i = 0; i < TD_MEMORY_CATEGORIES; i++)
        assert_int_equal(span->by_category[i], states[peak].live[i]);
}

/* Blocks of equal size that touch, with tensors of all and of half of a block, in any order, against a replay
 * that looks at places alone. Freeing a block ends the tensors in it. What ends without a begin, and an
 * allocation that failed, change nothing. */
TD_TEST(invented_recordings_are_replayed)
{
    enum { PLACES = 6, HALVES = 2, BYTES = 8, BASE = 7, STRANGE = 3 };
    static const size_t sizes[HALVES] = {HALVES * BYTES, BYTES}; /* of tensors; the first is a block's, too */
    int64_t phases[] = {0, 900, 900, 2500, INVENTED};
    static char memory[PLACES * HALVES * BYTES];
    static td_memory_entry entries[INVENTED];
    static int64_t pairs[INVENTED];
    int64_t blocks[PLACES], tensors[PLACES][HALVES], choices[3 * INVENTED], events = 1;
    td_memory_recording recording = {.entries = entries, .count = INVENTED, .summary = {.base_bytes = BASE}};

    td_assert_ok(td_rng_tokens(&(td_rng){.seed = 1}, 0, 3 * INVENTED, PLACES * HALVES, choices));
    memset(blocks, -1, sizeof blocks);
    memset(tensors, -1, sizeof tensors);
    for (int64_t i = 0; i < INVENTED; i++) {
        const int64_t place = choices[3 * i] / HALVES, half = choices[3 * i] % HALVES;
        const bool whole = blocks[place] < 0 || choices[3 * i + 1] == 0;
        int64_t *const open = whole ? &blocks[place] : &tensors[place][half];
        const bool begins = *open < 0, strange = choices[3 * i + 2] < STRANGE;
        const td_memory_action action = whole    ? (begins ? TD_MEMORY_ALLOC : TD_MEMORY_FREE)
                                        : begins ? TD_MEMORY_LIVE
                                                 : TD_MEMORY_DEAD;
        static const td_memory_action odd[STRANGE] = {TD_MEMORY_OOM, TD_MEMORY_DEAD, TD_MEMORY_FREE};
        const int category = (int)choices[3 * i] % TD_MEMORY_CATEGORIES;

        entries[i] = (td_memory_entry){
            .event = {.action = strange ? odd[choices[3 * i + 2]] : action,
                      .address = memory + (place * HALVES + (whole ? 0 : half)) * BYTES,
                      .bytes = strange ? 3 : sizes[whole ? 0 : half],
                      .label = begins ? "a/x" : "b/x"},
            .category = whole ? (td_memory_category)(begins ? place % 2 : 2) : (td_memory_category)category};
        states[i + 1] = states[i];
        pairs[i] = -1;
        events += strange                    ? choices[3 * i + 2] == 1 ? 2 : choices[3 * i + 2] / 2
                  : action == TD_MEMORY_DEAD ? 2
                                             : 1;
        if (strange && entries[i].event.action == TD_MEMORY_FREE)
            entries[i].event.address = &recording;
        for (int64_t k = 0; k < HALVES && whole && !begins && !strange; k++)
            if (tensors[place][k] >= 0) {
                states[i + 1].live[entries[tensors[place][k]].category] -= sizes[k];
                states[i + 1].all -= sizes[k];
                pairs[tensors[place][k]] = i;
                tensors[place][k] = -1;
                events += 2;
            }
        if (!strange) {
            pairs[i] = *open;
            if (!begins)
                pairs[*open] = i;
            *open = begins ? i : -1;
            *(whole ? &states[i + 1].allocated : &states[i + 1].live[category]) +=
                begins ? entries[i].event.bytes : -entries[i].event.bytes;
            states[i + 1].all += whole ? 0 : begins ? sizes[half] : -sizes[half];
        }
        entries[i].event.current_bytes = states[i + 1].allocated + BASE;
    }
    /* The empty phase comes after the end of a tensor and before the begin of another. */
    while (entries[phases[1] - 1].event.action != TD_MEMORY_DEAD || pairs[phases[1] - 1] < 0 ||
           entries[phases[1]].event.action != TD_MEMORY_LIVE)
        phases[2] = ++phases[1];
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++)
        recording.summary.phases[phase] = (td_memory_span){
            .first = phases[phase], .end = phases[phase + 1], .begin_ns = 5 - phase, .end_ns = phase % 3};
    td_assert_ok(td_memory_replay(&recording));
    for (int64_t i = 0; i < INVENTED; i++) {
        td_in_case("entry %d", (int)i);
        assert_int_equal(entries[i].pair, pairs[i]);
        assert_int_equal(entries[i].live_bytes, states[i + 1].all);
        if (entries[i].event.action == TD_MEMORY_FREE && pairs[i] >= 0)
            assert_int_equal(entries[i].category, entries[pairs[i]].category);
    }
    for (int phase = 0; phase < TD_MEMORY_PHASES; phase++)
        check_span(&recording.summary.phases[phase], phases[phase], phases[phase + 1]);
    check_span(&recording.summary.whole, 0, INVENTED);
    assert_int_equal(recording.summary.entries, INVENTED);
    assert_int_equal(recording.summary.whole.begin_ns, 5);
    assert_int_equal(recording.summary.whole.end_ns, 2);
    assert_int_equal(td_memory_snapshot_events(&recording), events);
}

/* The text between the dots must be a number. */
TD_TEST(layers_are_found_in_names)
{
    static const struct {
        const char *name;
        int64_t layer;
        const char *rest;
    } names[] = {{"layers.12.attn.q", 12, "attn.q"},
                 {"layers.0.input", 0, "input"},
                 {"layers.x.input", -1, "layers.x.input"},
                 {"layers.3", -1, "layers.3"},
                 {"logits", -1, "logits"}};
    const char *rest;

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        td_in_case("%s", names[i].name);
        assert_int_equal(td_memory_layer_of(names[i].name, &rest), names[i].layer);
        assert_string_equal(rest, names[i].rest);
    }
}

int main(void)
{
    td_each(open_device, close_device);
    if (strcmp(MEMORY_DEVICE, "cpu") != 0)
        td_device_close(td_gpu_open()); /* without a GPU the program is skipped here */
    int failed = td_run_group("recordings on " MEMORY_DEVICE, (size_t)td_test_count, td_tests, NULL, NULL);

    failed += td_run_cases(&recordings, open_device, close_device);
    failed += td_run_cases(&blocks, open_device, close_device);
    return failed;
}
