/** The course's toy models by hand: linear layers with ReLU between them, and the mean squared error. */
#ifndef TD_TESTS_TOYS_H
#define TD_TESTS_TOYS_H

#include "base/base.h"

enum { TOY_TENSORS = 5, TOY_LAYERS = 5, TOY_IN = 10, TOY_OUT = 5, TOY_SAMPLES = 24 };

/** A parameter. Its gradient is added to `grad`; NULL: it is frozen. */
typedef struct toy_tensor {
    const char *name;
    int rows, cols; /* cols 0: a vector */
    bool frozen;
    int uses;
    float data[500];
    float *grad;
} toy_tensor;

typedef struct toy_layer {
    int weight, bias; /* indices of tensors; -1: no bias */
} toy_layer;

typedef struct toy {
    int tensor_count, layer_count;
    toy_tensor tensors[TOY_TENSORS];
    toy_layer layers[TOY_LAYERS];
} toy;

/** 10 -> 10 -> 50 -> 5 with a frozen bias of the second layer and a frozen, unused tensor. `tied`: 10 -> 10
 * -> 50 -> 10 -> 50 -> 5; the fourth layer shares the weight of the second. */
void toy_make(toy *model, bool tied, uint64_t seed);

int64_t toy_numel(const toy_tensor *tensor);

/** All samples: inputs [TOY_SAMPLES][TOY_IN], labels [TOY_SAMPLES][TOY_OUT]. */
void toy_samples(float *inputs, float *labels);

/** The numbers 0 to count - 1 in the order of step `step`. */
void toy_shuffle(int step, int count, int *out);

/** Adds the gradients of the mean squared error over the given samples. ready may be NULL; it is called as
 * ready(user, tensor) after each contribution to a gradient. */
void toy_backward(const toy *model, const int *samples, int count, void (*ready)(void *user, int tensor),
                  void *user);

#endif
