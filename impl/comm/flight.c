#include "comm/flight.h"

#include "base/check.h"

td_status td_flight_init(td_flight *flight, td_device *dev)
{
    td_status status = TD_OK;

    flight->dev = dev;
    if (td_device_kind_of(dev) == TD_DEVICE_CPU)
        goto cleanup;
    if (!flight->side)
        TD_TRY(td_stream_create(dev, &flight->side));
    if (!flight->event)
        TD_TRY(td_event_create(dev, &flight->event));
cleanup:
    return status;
}

void td_flight_deinit(td_flight *flight)
{
    (void)td_flight_wait(flight, flight->sent);
    td_event_destroy(flight->event);
    td_stream_destroy(flight->side);
}

td_status td_flight_slot(td_flight *flight, td_work ***work)
{
    *work = &flight->works[flight->sent % TD_FLIGHT_MOST];
    return td_flight_wait(flight, flight->sent + 1 - TD_FLIGHT_MOST);
}

td_status td_flight_wait(td_flight *flight, int64_t until)
{
    td_stream *const current = flight->side ? td_device_stream(flight->dev) : NULL;
    td_status status = TD_OK;

    if (flight->done >= until)
        return status;
    if (flight->side)
        status = td_device_set_stream(flight->dev, flight->side);
    for (; flight->done < until; flight->done++) {
        td_work *const work = flight->works[flight->done % TD_FLIGHT_MOST];
        const td_status waited = flight->host ? td_work_wait(work) : td_work_queue_wait(work);

        if (status == TD_OK)
            status = waited;
    }
    if (flight->side) {
        if (status == TD_OK)
            status = td_event_record(flight->event);
        (void)td_device_set_stream(flight->dev, current);
    }
    return status;
}

td_status td_flight_poll(td_flight *flight)
{
    td_status status = TD_OK;
    bool done = true;

    if (flight->side)
        return td_flight_wait(flight, flight->sent);
    while (flight->done < flight->sent) {
        TD_TRY(td_work_test(flight->works[flight->done % TD_FLIGHT_MOST], &done));
        if (!done)
            break;
        TD_TRY(td_flight_wait(flight, flight->done + 1));
    }
cleanup:
    return status;
}
