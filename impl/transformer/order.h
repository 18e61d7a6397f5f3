/** Internal to impl/: the order of a step, before there is a model. */
#ifndef TD_TRANSFORMER_ORDER_H
#define TD_TRANSFORMER_ORDER_H

#include "base/status.h"

#include <stdint.h>

/** The parameters of a model in the order in which their gradients become final, each as its place in the
 * block of weights, from 0. Of a range that becomes final as a whole, the last comes first.
 *
 *   layers  1 to 65,535, as a model has
 *   order   [9 layers + 3]  out
 *
 * TD_NO_MEMORY. */
td_status td_final_order(int64_t layers, int64_t *order);

#endif
