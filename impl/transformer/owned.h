/** Internal to impl/: the pieces of the block of weights that this rank has. */
#ifndef TD_TRANSFORMER_OWNED_H
#define TD_TRANSFORMER_OWNED_H

#include "transformer/plan.h"

/** TD_BAD_ARGUMENT unless the config's owned ranges are ascending parts of the block. TD_UNSUPPORTED:
 * transient gradients, whose place needs the whole block. */
td_status td_owned_check(const td_transformer_config *config, const td_layout *layout);

/** *out = the index of an attention: a number that ranks can compare. TD_BAD_ARGUMENT: no such name. */
td_status td_attention_index(const char *name, int *out);

/** A range whose masters this rank has, all stored alike. */
typedef struct td_owned {
    td_range range;
    bool planes;
    int64_t index; /* the number of the owned range that it is in */
    int32_t place; /* the place of its gradients; 0: memory of their own */
} td_owned;

/** Goes to the next range; false: there is none. Begin with a struct of zeros. */
bool td_owned_next(const td_plan *plan, td_owned *owned);

/** Returns the number of pieces. *params, *grads: the bytes of all masters and of all gradients. The masters
 * of a piece, and its gradients, begin at a multiple of TD_ALIGNMENT bytes. If this rank has all weights,
 * there is no gap between pieces. Shared places of gradients come first. */
int64_t td_owned_measure(const td_plan *plan, size_t *params, size_t *grads);

/** Fills pieces [td_owned_measure] with addresses in the memory at params and grads; grads NULL: no
 * gradients. */
void td_owned_fill(const td_plan *plan, char *params, char *grads, td_piece *pieces);

/** TD_BAD_STATE if `where` is NULL: no piece of this rank has the whole range, and no link has set an
 * address. */
td_status td_check_address(const char *what, td_range range, const void *where);

/** td_weights_master of the range's begin, if one piece has the whole range; else zeros. */
td_master td_weights_in_one(const td_weights *weights, td_range range);

/** The intersection of two ranges. It is empty if its end is not above its begin. */
td_range td_range_both(td_range a, td_range b);

/** Takes the next part of *rest that one piece has: *part, at *master. Skips elements that this rank does not
 * have. *rest then begins after *part. False: this rank has no more elements of *rest. */
bool td_weights_take(const td_weights *weights, td_range *rest, td_range *part, td_master *master);

/** TD_UNSUPPORTED unless this rank has all elements of the range. `instead`: the end of the message.
 * td_owned_has checks a model that will be made with this config. */
td_status td_weights_check(const td_weights *weights, td_range range, const char *instead);
td_status td_owned_has(const td_transformer_config *config, td_range range, const char *instead);

/** The ranges of weights that a forward pass needs, or a backward pass with its recomputations, in this
 * order. A range that is needed again comes again. Returns their number; ranges [most] gets the first ones.
 * */
int64_t td_needs(const td_transformer *model, bool forward, int64_t most, td_range *ranges);

/** Copies the numbers of the range to `numbers` on the device. This rank must have all of the range. */
td_status td_weights_read(td_device *dev, const td_weights *weights, td_range range, void *numbers);

#endif
