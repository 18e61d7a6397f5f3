#include "support/toys.h"

#include "base/rng.h"
#include "support/compare.h"
#include "support/test.h"

enum { WIDEST = 50 };

static toy_tensor tensor(const char *name, int rows, int cols, bool frozen, int uses)
{
    return (toy_tensor){.name = name, .rows = rows, .cols = cols, .frozen = frozen, .uses = uses};
}

int64_t toy_numel(const toy_tensor *t)
{
    return (int64_t)t->rows * (t->cols > 0 ? t->cols : 1);
}

void toy_make(toy *model, bool tied, uint64_t seed)
{
    *model = (toy){.tensor_count = tied ? 4 : 5, .layer_count = tied ? 5 : 3};
    if (tied) {
        const toy_layer layers[] = {{0, -1}, {1, -1}, {2, -1}, {1, -1}, {3, -1}};

        memcpy(model->layers, layers, sizeof layers);
        model->tensors[0] = tensor("fc1.weight", 10, 10, false, 1);
        model->tensors[1] = tensor("fc2.weight", 50, 10, false, 2);
        model->tensors[2] = tensor("fc3.weight", 10, 50, false, 1);
        model->tensors[3] = tensor("fc5.weight", 5, 50, false, 1);
    } else {
        const toy_layer layers[] = {{0, -1}, {1, 2}, {3, -1}};

        memcpy(model->layers, layers, sizeof layers);
        model->tensors[0] = tensor("fc1.weight", 10, 10, false, 1);
        model->tensors[1] = tensor("fc2.weight", 50, 10, false, 1);
        model->tensors[2] = tensor("fc2.bias", 50, 0, true, 0);
        model->tensors[3] = tensor("fc3.weight", 5, 50, false, 1);
        model->tensors[4] = tensor("no_grad_fixed_param", 2, 2, true, 0);
    }
    for (int i = 0; i < model->tensor_count; i++) {
        toy_tensor *t = &model->tensors[i];
        const td_rng rng = {.seed = seed, .stream = (uint64_t)i};

        td_assert_ok(td_rng_normal(&rng, 0, toy_numel(t), 0, 0.3f, t->data));
    }
}

void toy_samples(float *inputs, float *labels)
{
    const td_rng rng = {.seed = 42};

    td_assert_ok(td_rng_normal(&rng, 0, TOY_SAMPLES * TOY_IN, 0, 1, inputs));
    td_assert_ok(td_rng_normal(&rng, TOY_SAMPLES * TOY_IN, TOY_SAMPLES * TOY_OUT, 0, 1, labels));
}

void toy_shuffle(int step, int count, int *out)
{
    const td_rng rng = {.seed = 42 + (uint64_t)step};
    int64_t draws[TOY_SAMPLES];

    td_assert_ok(td_rng_tokens(&rng, 0, count, 1 << 20, draws));
    for (int i = 0; i < count; i++)
        out[i] = i;
    for (int i = count - 1; i > 0; i--) {
        const int other = (int)(draws[i] % (i + 1)), kept = out[i];

        out[i] = out[other];
        out[other] = kept;
    }
}

/** The outputs of all layers; the last layer has no ReLU. */
static void forward(const toy *model, const float *input, float out[TOY_LAYERS + 1][WIDEST])
{
    memcpy(out[0], input, TOY_IN * sizeof *input);
    for (int l = 0; l < model->layer_count; l++) {
        const toy_tensor *w = &model->tensors[model->layers[l].weight];
        const int bias = model->layers[l].bias;

        for (int row = 0; row < w->rows; row++) {
            float sum = bias >= 0 ? model->tensors[bias].data[row] : 0;

            for (int col = 0; col < w->cols; col++)
                sum += w->data[row * w->cols + col] * out[l][col];
            out[l + 1][row] = l + 1 < model->layer_count && sum < 0 ? 0 : sum;
        }
    }
}

void toy_backward(const toy *model, const int *samples, int count, void (*ready)(void *user, int tensor),
                  void *user)
{
    static float inputs[TOY_SAMPLES * TOY_IN], labels[TOY_SAMPLES * TOY_OUT];
    static float outputs[TOY_SAMPLES][TOY_LAYERS + 1][WIDEST], grads[TOY_SAMPLES][WIDEST];

    toy_samples(inputs, labels);
    for (int s = 0; s < count; s++) {
        forward(model, inputs + samples[s] * TOY_IN, outputs[s]);
        for (int i = 0; i < TOY_OUT; i++)
            grads[s][i] = 2 * (outputs[s][model->layer_count][i] - labels[samples[s] * TOY_OUT + i]) /
                          (float)(count * TOY_OUT);
    }
    for (int l = model->layer_count - 1; l >= 0; l--) {
        const int weight = model->layers[l].weight;
        const toy_tensor *w = &model->tensors[weight];

        for (int s = 0; s < count; s++) {
            float before[WIDEST] = {0};

            for (int row = 0; row < w->rows; row++)
                for (int col = 0; col < w->cols; col++) {
                    w->grad[row * w->cols + col] += grads[s][row] * outputs[s][l][col];
                    before[col] += grads[s][row] * w->data[row * w->cols + col];
                }
            for (int col = 0; col < w->cols; col++)
                grads[s][col] = outputs[s][l][col] > 0 ? before[col] : 0;
        }
        if (ready)
            ready(user, weight);
    }
}
