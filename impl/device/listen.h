/** Internal to impl/: listeners of labels and operations.
 *
 * A device tells its memory history and every listener about labels (td_device_push_label) and operations.
 * Without listeners an operation costs one comparison, and callers can skip making names. */
#ifndef TD_DEVICE_LISTEN_H
#define TD_DEVICE_LISTEN_H

#include "device/device.h"

/** Labels with the handout's wording; Nsight Systems and PyTorch's profiler show them too. */
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
    const char *name; /* a string constant */
    td_op_class op_class;
    double flops,
        bytes; /* FLOPs of its GEMMs, and bytes if each operand is read or written once; 0: not known */
} td_operation;

/** A listener in a device's list; owned by the code that adds it. Its functions cannot fail and must not call
 * the device. */
typedef struct td_listener td_listener;
struct td_listener {
    td_listener *next;

    /** A label begins (operation is NULL), or an operation begins (label is its name). */
    void (*begin)(td_listener *listener, const char *label, const td_operation *operation);

    /** The label or operation that began last ends. Labels that were pushed before the listener was added are
     * not reported. */
    void (*end)(td_listener *listener);
};

/** Adds or removes a listener. A begin is reported to listeners in the order in which they were added, an end
 * in reverse order. */
void td_device_listen(td_device *dev, td_listener *listener);
void td_device_unlisten(td_device *dev, td_listener *listener); /* no effect if it is not in the list */

/** Whether the device has a listener. */
bool td_device_listened(const td_device *dev);

/** Call these before and after an operation. No effect without listeners. Calls nest. */
void td_device_begin_operation(td_device *dev, const td_operation *operation);
void td_device_end_operation(td_device *dev);

/** Ends an operation; returns `status`. */
static inline td_status td_operation_done(td_device *dev, td_status status)
{
    td_device_end_operation(dev);
    return status;
}

/** Pops a label; returns `status`, or the error of the pop if `status` is TD_OK. */
static inline td_status td_pop_after(td_device *dev, td_status status)
{
    const td_status popped = td_device_pop_label(dev);

    return status == TD_OK ? popped : status;
}

#endif
