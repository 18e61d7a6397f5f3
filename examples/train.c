/* Trains a small model on the bytes of a text, then prints the sentence that it has learned. */
#include <tandem/rng.h>
#include <tandem/train.h>

#include <stdio.h>

enum { BATCH = 8, CONTEXT = 64, BYTES = 256, STEPS = 150 };

static const char text[] = "A step is one object. It goes forward, then backward, and weights follow. "
                           "The device owns memory and time, and lends the step both. "
                           "Whoever asks for more is told what was wrong. ";

/* Every function has one exit, `cleanup`, with the status of the call that failed. The library does the
 * same. */
#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if ((status = (call)) != TD_OK)                                                                      \
            goto cleanup;                                                                                    \
    } while (0)

/* ids = random windows of the text; targets = the same windows, one byte later. */
static td_status load_batch(td_device *dev, uint64_t step, int64_t *ids, int64_t *targets)
{
    td_status status;
    int64_t from[BATCH], window[2][BATCH * CONTEXT];

    TRY(td_rng_tokens(&(td_rng){.stream = step}, 0, BATCH, sizeof text - 1 - CONTEXT, from));
    for (int i = 0; i < BATCH * CONTEXT; i++)
        for (int on = 0; on < 2; on++)
            window[on][i] = text[from[i / CONTEXT] + i % CONTEXT + on];
    TRY(td_device_upload(dev, ids, window[0], sizeof window[0]));
    TRY(td_device_upload(dev, targets, window[1], sizeof window[1]));
cleanup:
    return status;
}

/* Prints "T" and then always the most probable next byte, up to a full stop. */
static td_status write_sentence(td_device *dev, td_transformer *model, int64_t *ids)
{
    td_status status = TD_OK;
    int64_t said[CONTEXT] = {'T'};
    const void *logits;
    float last[BYTES];

    for (int length = 1; putchar((int)said[length - 1]) != '.' && length < CONTEXT; length++) {
        TRY(td_device_upload(dev, ids, said, (size_t)length * sizeof *said));
        TRY(td_transformer_forward(model, ids, 1, length, &logits));
        TRY(td_device_download(dev, last, (const float *)logits + (length - 1) * BYTES, sizeof last));
        for (int byte = 1; byte < BYTES; byte++)
            said[length] = last[byte] > last[said[length]] ? byte : said[length];
    }
    putchar('\n');
cleanup:
    return status;
}

int main(int argc, char **argv)
{
    const td_train_config config = {
        .model = {.size = {.d_model = 64, .d_ff = 192, .layers = 2, .heads = 4, .vocab = BYTES},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .attention = "flash"},
        .hyper = {.adamw = td_adamw_defaults(TD_ADAMW_TORCH)}};
    const size_t bytes = BATCH * CONTEXT * sizeof(int64_t);
    td_status status;
    td_device *dev = NULL;
    td_train *train = NULL;
    void *ids, *targets;
    float loss;

    TRY(td_device_open(argc > 1 ? argv[1] : "cpu", &dev)); /* or "cuda" */
    TRY(td_device_alloc(dev, bytes, &ids));
    TRY(td_device_alloc(dev, bytes, &targets));
    TRY(td_train_create(dev, &config, &train));
    TRY(td_train_init(train, 0));
    for (int step = 0; step <= STEPS; step++) {
        TRY(load_batch(dev, (uint64_t)step, ids, targets));
        TRY(td_train_step(train, ids, targets, BATCH, CONTEXT));
        TRY(td_train_loss(train, &loss)); /* waits for the device */
        if (step % 50 == 0)
            printf("step %3d: loss %.2f\n", step, loss);
    }
    TRY(write_sentence(dev, td_train_model(train), ids));
cleanup:
    if (status != TD_OK)
        fprintf(stderr, "%s: %s\n", td_status_name(status), td_last_error());
    td_train_destroy(train);
    td_device_close(dev); /* frees its blocks too */
    return status == TD_OK ? 0 : 1;
}
