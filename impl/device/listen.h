/** Internal to impl/: who is told what runs.
 *
 * Labels (td_device_push_label) and operations go one way: a device tells its memory history and every
 * listener of each. Where nobody listens an operation costs a comparison, and nobody need make up a name. */
#ifndef TD_DEVICE_LISTEN_H
#define TD_DEVICE_LISTEN_H

#include "device/device.h"

/** Labels in the words of the handout, which Nsight Systems and PyTorch's profiler show as well. */
#define TD_LABEL_WARMUP    "warmup"
#define TD_LABEL_STEP      "step"
#define TD_LABEL_FORWARD   "forward"
#define TD_LABEL_LOSS      "loss"
#define TD_LABEL_BACKWARD  "backward"
#define TD_LABEL_OPTIMIZER "optimizer"
#define TD_LABEL_ATTENTION "scaled dot product attention"
#define TD_LABEL_SCORES    "computing attention scores"
#define TD_LABEL_SOFTMAX   "computing softmax"
#define TD_LABEL_VALUES    "final matmul"

/** One call of an operation. */
typedef struct td_operation {
    const char *name; /* a constant */
    td_op_class op_class;
    double flops, bytes; /* of its products, and read and written once; 0: not told */
} td_operation;

/** A link in a device's list; whoever listens owns it. It may not fail, and calls nothing of the device. */
typedef struct td_listener td_listener;
struct td_listener {
    td_listener *next;

    /** operation NULL: a label begins. Otherwise label is the operation's name. */
    void (*begin)(td_listener *listener, const char *label, const td_operation *operation);

    /** What began last ends. Labels that were in force before are not known to have begun. */
    void (*end)(td_listener *listener);
};

/** From here on, and until it is taken off again. Listeners are told in the order that they came in, and in
 * the reverse order of what ends. */
void td_device_listen(td_device *dev, td_listener *listener);
void td_device_unlisten(td_device *dev, td_listener *listener); /* one that does not listen stays out */

/** Whether anybody listens. */
bool td_device_listened(const td_device *dev);

/** Around a call of an operation; of no effect where nobody listens. They nest. */
void td_device_begin_operation(td_device *dev, const td_operation *operation);
void td_device_end_operation(td_device *dev);

/** Ends the operation of a call that returned `status`, and returns that. */
static inline td_status td_operation_done(td_device *dev, td_status status)
{
    td_device_end_operation(dev);
    return status;
}

/** Pops a label; returns `status`, or the pop's if that was TD_OK. */
static inline td_status td_pop_after(td_device *dev, td_status status)
{
    const td_status popped = td_device_pop_label(dev);

    return status == TD_OK ? popped : status;
}

#endif
