/** Internal to impl/: a queue of unfinished collectives.
 *
 *     td_work **work;
 *
 *     TD_TRY(td_flight_slot(flight, &work));
 *     TD_TRY(td_comm_all_reduce(comm, in, out, count, type, TD_SUM, work));
 *     flight->sent++;
 *     TD_TRY(td_flight_wait(flight, flight->sent));
 *
 * They are waited for in the order in which they were sent. In a zeroed flight the device's current stream
 * waits, or the host if the device is a CPU. */
#ifndef TD_COMM_FLIGHT_H
#define TD_COMM_FLIGHT_H

#include "comm/comm.h"

enum { TD_FLIGHT_MOST = 512 }; /* unfinished at a time; a communicator has 1024 handles for all users */

typedef struct td_flight {
    td_device *dev;
    td_stream *side; /* a stream that waits, so that the current stream need not; NULL: none */
    td_event *event; /* recorded on `side` after it has waited for `done` collectives; NULL without `side` */
    bool host;       /* the host waits, even on a GPU */
    int64_t sent, done; /* number of collectives since td_flight_init: sent; waited for */
    td_work *works[TD_FLIGHT_MOST];
} td_flight;

/** Gives a zeroed flight its own stream, unless dev is a CPU. TD_NO_MEMORY. Call td_flight_deinit also after
 * an error. */
td_status td_flight_init(td_flight *flight, td_device *dev);

/** Waits for all collectives first. */
void td_flight_deinit(td_flight *flight);

/** *work = the slot for the next collective's handle. If the queue is full, waits for the oldest
 * collective. */
td_status td_flight_slot(td_flight *flight, td_work ***work);

/** Waits for the first `until` collectives, even if one fails; returns the first error. */
td_status td_flight_wait(td_flight *flight, int64_t until);

/** Waits without blocking the host: for all collectives if the flight has its own stream, otherwise for those
 * that have ended. */
td_status td_flight_poll(td_flight *flight);

#endif
