/* Trains on the bytes of a file with one or several ranks, evaluates on the file's last tenth, and writes
 * checkpoints from which a later run goes on:
 *
 *     train_text TEXT CHECKPOINT STEPS
 *     mpirun -n 2 train_text TEXT CHECKPOINT STEPS
 *
 * Batches depend on the step and not on the number of ranks, so another number of ranks can go on. */
#include <tandem/launch.h>
#include <tandem/rng.h>
#include <tandem/shard.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BATCH = 8, CONTEXT = 32, BYTES = 256, EVERY = 10, SCHEDULE = 200, LONGEST = 1 << 24 };

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if ((status = (call)) != TD_OK)                                                                      \
            goto cleanup;                                                                                    \
    } while (0)

typedef struct run {
    td_device *dev;
    td_train *train;
    td_launch launch;
    unsigned char *text;
    int64_t length, held_out; /* the file's bytes, and where the part begins that trains nothing */
    void *ids, *targets;
} run;

/* Loads `count` windows of [begin, end) from window `first` of the stream on. */
static td_status load_windows(run *r, uint64_t stream, int64_t begin, int64_t end, int64_t first,
                              int64_t count)
{
    td_status status;
    int64_t from[BATCH], window[2][BATCH * CONTEXT];
    const size_t bytes = (size_t)(count * CONTEXT) * sizeof(int64_t);

    TRY(td_rng_tokens(&(td_rng){.stream = stream}, 0, BATCH, end - begin - CONTEXT, from));
    for (int64_t i = 0; i < count * CONTEXT; i++)
        for (int on = 0; on < 2; on++)
            window[on][i] = r->text[begin + from[first + i / CONTEXT] + i % CONTEXT + on];
    TRY(td_device_upload(r->dev, r->ids, window[0], bytes));
    TRY(td_device_upload(r->dev, r->targets, window[1], bytes));
cleanup:
    return status;
}

/* One rank may evaluate alone, except with TD_SHARD_FULL. */
static td_status evaluate(run *r, float *loss)
{
    td_transformer *const model = td_train_model(r->train);
    const void *logits;
    td_status status;

    TRY(load_windows(r, UINT64_MAX, r->held_out, r->length, 0, BATCH));
    TRY(td_transformer_forward(model, r->ids, BATCH, CONTEXT, &logits));
    TRY(td_transformer_loss(model, r->targets, loss));
cleanup:
    return status;
}

static td_status step(run *r, int64_t number)
{
    const int64_t mine = BATCH / r->launch.ranks;
    td_hyperparameters hyper = {.adamw = td_adamw_defaults(TD_ADAMW_TORCH)};
    td_status status;
    double rate;

    TRY(td_cosine_schedule(number + 1, 3e-3, 3e-4, 10, SCHEDULE, &rate));
    hyper.adamw.lr = (float)rate;
    TRY(td_train_set(r->train, &hyper));
    TRY(load_windows(r, (uint64_t)number, 0, r->held_out, r->launch.rank * mine, mine));
    TRY(td_train_step(r->train, r->ids, r->targets, mine, CONTEXT));
cleanup:
    return status;
}

/* The metadata says of which text a checkpoint is. */
static td_status resume(run *r, td_comm *comm, const char *path, const char *length)
{
    td_safetensors *file = NULL;
    td_status status;

    TRY(td_safetensors_open(path, &file));
    const char *of = td_safetensors_metadata(file, "text_bytes");
    if (!of || strcmp(of, length) != 0) {
        fprintf(stderr, "'%s' is of a text of %s bytes, not of %s\n", path, of ? of : "?", length);
        status = TD_BAD_ARGUMENT;
        goto cleanup;
    }
    TRY(td_shard_restore(comm, r->train, path));
cleanup:
    td_safetensors_close(file);
    return status;
}

static td_status train_all(run *r, td_comm *comm, const char *path, int64_t steps)
{
    char length[24];
    td_status status;
    int64_t done;
    float loss;

    snprintf(length, sizeof length, "%lld", (long long)r->length);
    TRY(td_train_set_metadata(r->train, 1, &(td_stored_text){"text_bytes", length}));
    if (access(path, F_OK) == 0)
        TRY(resume(r, comm, path, length));
    TRY(td_train_steps(r->train, &done));
    for (; done < steps; done++) {
        TRY(step(r, done));
        if ((done + 1) % EVERY != 0)
            continue;
        TRY(td_shard_save(comm, r->train, path));
        if (r->launch.rank == 0) {
            TRY(evaluate(r, &loss));
            printf("step %lld: held out %.4f\n", (long long)done + 1, loss);
        }
    }
cleanup:
    return status;
}

int main(int argc, char **argv)
{
    td_train_config config = {
        .model = {.size = {.d_model = 32, .d_ff = 96, .layers = 2, .heads = 2, .vocab = BYTES},
                  .batch = BATCH,
                  .context = CONTEXT,
                  .attention = "flash"},
        .hyper = {.adamw = td_adamw_defaults(TD_ADAMW_TORCH)},
        .clip = 1};
    const td_shard_options options = {.kind = TD_SHARD_FLAT, .bucket_mb = 25};
    td_shard_link *link = NULL;
    td_comm *comm = NULL;
    run r = {.text = malloc(LONGEST)};
    FILE *const file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    td_status status = TD_BAD_ARGUMENT;

    if (!file || !r.text)
        return fprintf(stderr, "usage: train_text TEXT CHECKPOINT STEPS\n"), 1;
    r.length = (int64_t)fread(r.text, 1, LONGEST, file);
    r.held_out = r.length - r.length / 10;
    fclose(file);
    TRY(td_launch_read(getenv, &r.launch));
    TRY(td_cpu_set_threads(1)); /* ranks of one machine share its cores */
    TRY(td_device_open("cpu", &r.dev));
    TRY(td_comm_open(r.dev,
                     &(td_comm_options){.backend = TD_COMM_GLOO,
                                        .rank = r.launch.rank,
                                        .ranks = r.launch.ranks,
                                        .local_ranks = r.launch.local_ranks,
                                        .run = r.launch.run},
                     &comm));
    TRY(td_device_alloc(r.dev, BATCH * CONTEXT * sizeof(int64_t), &r.ids));
    TRY(td_device_alloc(r.dev, BATCH * CONTEXT * sizeof(int64_t), &r.targets));
    TRY(td_shard_link_create(comm, &options, &config, &config, &link));
    TRY(td_train_create(r.dev, &config, &r.train));
    TRY(td_train_init(r.train, 0));
    TRY(td_shard_link_attach(link, r.dev, r.train));
    TRY(train_all(&r, comm, argv[2], atoll(argv[3])));
cleanup:
    if (status != TD_OK)
        fprintf(stderr, "%s: %s\n", td_status_name(status), td_last_error());
    td_train_destroy(r.train);
    td_shard_link_destroy(link);
    if (comm && td_comm_close(comm) != TD_OK && status == TD_OK)
        status = TD_RANK_FAILED;
    td_device_close(r.dev);
    free(r.text);
    return status == TD_OK ? 0 : 1;
}
