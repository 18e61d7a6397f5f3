/** Internal to impl/: the weights that this rank has, as pieces of the block. */
#ifndef TD_TRANSFORMER_OWNED_H
#define TD_TRANSFORMER_OWNED_H

#include "transformer/plan.h"

/** TD_BAD_ARGUMENT unless the config's owned ranges are ascending parts of the block. TD_UNSUPPORTED:
 * transient gradients, whose place needs the whole block. */
td_status td_owned_check(const td_transformer_config *config, const td_layout *layout);

/** A stretch of masters that this rank has, all stored alike. */
typedef struct td_owned {
    td_range range;
    bool planes;
    int64_t index; /* of the owned range that it is in */
    int32_t place; /* of its gradients; 0: of its own */
} td_owned;

/** Goes to the next stretch of the plan; false: there is none. Zeros stand before the first. */
bool td_owned_next(const td_plan *plan, td_owned *owned);

/** How many pieces there are, and the bytes of their masters and gradients, each of which begins at a
 * multiple of TD_ALIGNMENT bytes. If all weights are owned, there is nothing between them. Shared places of
 * gradients come first. */
int64_t td_owned_measure(const td_plan *plan, size_t *params, size_t *grads);

/** Fills pieces [td_owned_measure] for memory at params and grads; grads NULL: there is none. */
void td_owned_place(const td_plan *plan, char *params, char *grads, td_piece *pieces);

/** TD_BAD_STATE if `where` is NULL: this rank does not have the range in one piece, and no link placed it. */
td_status td_check_place(const char *what, td_range range, const void *where);

/** td_weights_master of the range's begin, if one piece has the whole range; else zeros. */
td_master td_weights_in_one(const td_weights *weights, td_range range);

/** What two ranges have in common; nothing: its end is not above its begin. */
td_range td_range_both(td_range a, td_range b);

/** Takes from the begin of *rest what one piece has of it, without the elements before it that this rank does
 * not have. False: it has none of *rest, or *rest is empty. */
bool td_weights_take(const td_weights *weights, td_range *rest, td_range *part, td_master *master);

/** TD_UNSUPPORTED unless this rank has all elements of the range. `instead`: what the caller can do, for the
 * message. The second one is of a model that will be made with this config. */
td_status td_weights_check(const td_weights *weights, td_range range, const char *instead);
td_status td_owned_has(const td_transformer_config *config, td_range range, const char *instead);

/** The ranges of weights that a forward pass of the model needs, or a backward pass with its recomputations,
 * one after the other; a range comes as often as it is needed anew. Returns how many there are, of which
 * ranges [most] gets the first. */
int64_t td_needs(const td_transformer *model, bool forward, int64_t most, td_range *ranges);

/** The numbers of a range that this rank has all of, on the device. */
td_status td_weights_read(td_device *dev, const td_weights *weights, td_range range, void *numbers);

#endif
