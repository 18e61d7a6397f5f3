/** Internal to impl/: collectives that were sent and that nobody has waited for yet.
 *
 *     td_work **work;
 *
 *     TD_TRY(td_flight_place(flight, &work));
 *     TD_TRY(td_comm_all_reduce(comm, in, out, count, type, TD_SUM, work));
 *     flight->sent++;
 *     TD_TRY(td_flight_wait(flight, flight->sent));
 *
 * They are waited for in the order in which they were sent. A zeroed flight is ready: the device's current
 * stream then waits, or the host of a CPU. */
#ifndef TD_COMM_FLIGHT_H
#define TD_COMM_FLIGHT_H

#include "comm/comm.h"

enum { TD_FLIGHT_MOST = 512 }; /* at a time: comm has 1024 handles for all of its callers */

typedef struct td_flight {
    td_device *dev;
    td_stream
        *side; /* this stream waits, so that the device's current one goes on; NULL: no stream of its own */
    td_event *event;    /* recorded on `side` after it has waited for `done` collectives; NULL if side is */
    bool host;          /* the host waits, on a GPU as well */
    int64_t sent, done; /* collectives since td_flight_init: sent; waited for */
    td_work *works[TD_FLIGHT_MOST];
} td_flight;

/** Gives a zeroed flight a stream of its own, unless dev is a CPU. TD_NO_MEMORY: td_flight_deinit drops what
 * there is. */
td_status td_flight_init(td_flight *flight, td_device *dev);

/** Waits for all collectives first. */
void td_flight_deinit(td_flight *flight);

/** *work: where the next collective's handle goes. Waits for the oldest one if there is no other place. */
td_status td_flight_place(td_flight *flight, td_work ***work);

/** Waits for the first `until` collectives, also after one has failed; returns the first failure. */
td_status td_flight_wait(td_flight *flight, int64_t until);

/** Waits as far as the host does not have to: for all with a stream of its own, and otherwise for those that
 * have ended. */
td_status td_flight_poll(td_flight *flight);

#endif
