/* Reports labels and operations to listeners and to the memory history. */
#include "base/check.h"
#include "base/utf8.h"
#include "device/inside.h"

#include <string.h>

/* ---- listeners ---- */

static void tell_begin(td_device *dev, const char *label, const td_operation *operation)
{
    for (td_listener *listener = dev->listeners; listener; listener = listener->next)
        listener->begin(listener, label, operation);
}

/** Tells the last listener first, so that its ranges lie inside those that listeners before it make. */
static void tell_end(td_listener *listener)
{
    if (!listener)
        return;
    tell_end(listener->next);
    listener->end(listener);
}

void td_device_begin_operation(td_device *dev, const td_operation *operation)
{
    if (dev->listeners)
        tell_begin(dev, operation->name, operation);
}

void td_device_end_operation(td_device *dev)
{
    tell_end(dev->listeners);
}

/* ---- labels ---- */

const char *td_op_class_name(td_op_class op_class)
{
    static const char *const names[TD_OP_CLASSES] = {
        [TD_OP_OTHER] = "other",
        [TD_OP_MATMUL] = "matmul",
        [TD_OP_ATTENTION] = "attention",
        [TD_OP_SOFTMAX] = "softmax",
        [TD_OP_OPTIMIZER] = "optimizer",
        [TD_OP_REDUCTION] = "reduction",
        [TD_OP_ELEMENTWISE] = "elementwise",
        [TD_OP_COMMUNICATION] = "communication",
        [TD_OP_MEMORY] = "memory",
    };

    return (unsigned)op_class < TD_OP_CLASSES ? names[op_class] : NULL;
}

void td_device_listen(td_device *dev, td_listener *listener)
{
    td_listener **last = &dev->listeners;

    while (*last)
        last = &(*last)->next;
    listener->next = NULL;
    *last = listener;
}

void td_device_unlisten(td_device *dev, td_listener *listener)
{
    for (td_listener **at = &dev->listeners; *at; at = &(*at)->next)
        if (*at == listener) {
            *at = listener->next;
            break;
        }
}

bool td_device_listened(const td_device *dev)
{
    return dev->listeners != NULL;
}

/* TD_BAD_ARGUMENT unless the label can be one part of a path. */
static td_status check_label(const char *what, const char *label)
{
    td_status status = TD_OK;

    TD_CHECK(label, "%s is NULL", what);
    TD_CHECK(*label && !strchr(label, '/'), "%s is '%s', needs at least one character and no '/'", what,
             label);
    TD_TRY(td_utf8_check(what, label));
cleanup:
    return status;
}

td_status td_device_push_label(td_device *dev, const char *label)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_label("label", label));
    TD_TRY(td_history_push(&dev->history, label));
    tell_begin(dev, label, NULL);
cleanup:
    return status;
}

td_status td_device_pop_label(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_FAIL_IF(dev->history.levels == 0, TD_BAD_STATE, "pop without a label: %s has no label that was pushed",
               dev->name);
    dev->history.levels--;
    tell_end(dev->listeners);
cleanup:
    return status;
}

td_status td_device_history_begin(td_device *dev, int64_t capacity)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_CHECK(capacity >= 1, "capacity is %" PRId64 ", needs at least 1", capacity);
    TD_TRY(td_history_begin(&dev->history, capacity));
cleanup:
    return status;
}

bool td_device_history_running(const td_device *dev)
{
    return dev && dev->history.running;
}

td_status td_device_history_end(td_device *dev)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    if (!dev->history.running)
        status = td_fail(TD_BAD_STATE, "no history is running on %s", dev->name);
    dev->history.running = false;
cleanup:
    return status;
}

td_status td_device_history(const td_device *dev, const td_memory_event **events, int64_t *count,
                            int64_t *dropped)
{
    td_status status = TD_OK;

    TD_NOT_NULL(dev, events, count, dropped);
    *events = dev->history.events;
    *count = dev->history.count;
    *dropped = dev->history.dropped;
cleanup:
    return status;
}

void td_device_note(td_device *dev, td_memory_action action, const void *address, size_t bytes,
                    const char *name)
{
    td_history_add(
        &dev->history,
        (td_memory_event){
            .action = action, .address = address, .bytes = bytes, .current_bytes = dev->memory.current_bytes},
        name);
}

static td_status note_tensor(td_device *dev, td_memory_action action, const char *name, const void *address,
                             size_t bytes)
{
    td_status status = TD_OK;

    TD_CHECK(dev, "dev is NULL");
    TD_TRY(check_label("name", name));
    TD_CHECK(address, "address is NULL");
    td_device_note(dev, action, address, bytes, name);
cleanup:
    return status;
}

td_status td_device_note_live(td_device *dev, const char *name, const void *address, size_t bytes)
{
    return note_tensor(dev, TD_MEMORY_LIVE, name, address, bytes);
}

td_status td_device_note_dead(td_device *dev, const char *name, const void *address, size_t bytes)
{
    return note_tensor(dev, TD_MEMORY_DEAD, name, address, bytes);
}
