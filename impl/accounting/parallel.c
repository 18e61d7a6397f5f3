#include "accounting/checks.h"

#include <math.h>

/* ---- distributed data parallel ---- */

td_status td_account_ddp_overhead(double bytes, double bytes_per_second, double seconds_per_call,
                                  double buckets, double *seconds)
{
    td_status status = TD_OK;

    TD_CHECK(seconds, "seconds is NULL");
    TD_TRY(td_account_rate("bytes", bytes));
    TD_TRY(td_account_rate("bytes_per_second", bytes_per_second));
    TD_TRY(td_account_rate("seconds_per_call", seconds_per_call));
    TD_TRY(td_account_rate("buckets", buckets));
    *seconds = bytes / (buckets * bytes_per_second) + buckets * seconds_per_call;
cleanup:
    return status;
}

td_status td_account_ddp_optimum_find(double bytes, double bytes_per_second, double seconds_per_call,
                                      td_account_ddp_optimum *out)
{
    td_status status = TD_OK;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_rate("bytes", bytes));
    TD_TRY(td_account_rate("bytes_per_second", bytes_per_second));
    TD_TRY(td_account_rate("seconds_per_call", seconds_per_call));
    out->buckets = sqrt(bytes / (seconds_per_call * bytes_per_second));
    out->bucket_bytes = sqrt(bytes * seconds_per_call * bytes_per_second);
    out->seconds = 2.0 * sqrt(bytes * seconds_per_call / bytes_per_second);
cleanup:
    return status;
}

/* ---- communication_accounting ---- */

td_status td_account_xxl_memory_of(const td_account_xxl *model, td_account_xxl_memory *out)
{
    td_status status = TD_OK;
    td_account_xxl_memory m = {0};
    int64_t inputs = 0;

    TD_NOT_NULL(model, out);
    TD_TRY(td_account_extent("d_model", model->d_model));
    TD_TRY(td_account_extent("d_ff", model->d_ff));
    TD_TRY(td_account_extent("blocks", model->blocks));
    TD_TRY(td_product("parameters", TD_LIST(2, model->d_model, model->d_ff, model->blocks), &m.parameters));
    TD_TRY(td_product("state bytes", TD_LIST(16, m.parameters), &m.state_bytes));
    TD_TRY(td_account_sum("inputs of a block", TD_LIST(model->d_model, model->d_ff), &inputs));
    TD_TRY(td_product("saved bytes a token", TD_LIST(2, inputs, model->blocks), &m.saved_bytes_per_token));
    m.devices_80gb = (double)m.state_bytes / 80e9;
    m.devices_80gib = (double)m.state_bytes / (80.0 * 1024.0 * 1024.0 * 1024.0);

    *out = m;
cleanup:
    return status;
}

td_status td_account_xxl_fsdp_bytes(const td_account_xxl *model, int64_t tokens, int64_t devices, double *out)
{
    td_status status = TD_OK;
    td_account_xxl_memory m;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_xxl_memory_of(model, &m));
    TD_TRY(td_account_extent("tokens", tokens));
    TD_TRY(td_account_extent("devices", devices));
    double half = 0.5 * (double)tokens * (double)m.saved_bytes_per_token;
    *out = ((double)m.state_bytes + half) / (double)devices + half;
cleanup:
    return status;
}

td_status td_account_xxl_devices(const td_account_xxl *model, double device_bytes, int64_t *out)
{
    td_status status = TD_OK;
    td_account_xxl_memory m;

    TD_CHECK(out, "out is NULL");
    TD_TRY(td_account_xxl_memory_of(model, &m));
    TD_TRY(td_account_rate("device_bytes", device_bytes));
    double devices = ceil((double)m.state_bytes / device_bytes);
    TD_CHECK(devices < 0x1p63, "device_bytes is %g: the number of devices is beyond 2^63 - 1", device_bytes);
    *out = (int64_t)devices;
cleanup:
    return status;
}

td_status td_account_mesh_batch_of(const td_account_xxl *model, const td_account_mesh *mesh,
                                   td_account_mesh_batch *out)
{
    td_status status = TD_OK;
    td_account_mesh_batch b = {0};

    TD_NOT_NULL(model, mesh, out);
    TD_TRY(td_account_extent("d_model", model->d_model));
    TD_TRY(td_account_extent("d_ff", model->d_ff));
    TD_TRY(td_account_extent("blocks", model->blocks));
    TD_TRY(td_account_rate("flops_per_second", mesh->flops_per_second));
    TD_TRY(td_account_rate("bytes_per_second", mesh->bytes_per_second));
    TD_TRY(td_account_extent("fsdp", mesh->fsdp));
    TD_TRY(td_account_extent("tensor", mesh->tensor));
    TD_TRY(td_account_extent("fsdp_axes", mesh->fsdp_axes));
    TD_TRY(td_account_extent("tensor_axes", mesh->tensor_axes));

    double d_ff = (double)model->d_ff;
    double devices = (double)mesh->fsdp * (double)mesh->tensor;
    b.alpha = mesh->flops_per_second / mesh->bytes_per_second;
    b.fsdp_tokens = (double)mesh->fsdp * b.alpha / (double)mesh->fsdp_axes;
    b.fsdp_tokens_per_device = b.fsdp_tokens / devices;
    b.tensor_d_ff = (double)mesh->tensor * b.alpha / (double)mesh->tensor_axes;
    b.tensor_met = d_ff >= b.tensor_d_ff;
    /* Tensor parallelism keeps the wire busy for the share x = Y alpha / (M_Y d_ff) of the compute time. FSDP
     * has the rest: B (1 - x) >= X alpha / M_X. */
    double busy = b.tensor_d_ff / d_ff;
    b.shared_wire_tokens = busy < 1.0 ? b.fsdp_tokens / (1.0 - busy) : (double)INFINITY;
    b.shared_wire_tokens_per_device = b.shared_wire_tokens / devices;
    b.optimum_tokens_per_device =
        b.alpha * b.alpha / ((double)mesh->fsdp_axes * (double)mesh->tensor_axes * d_ff);

    *out = b;
cleanup:
    return status;
}

/* ---- the 2026 handout's calculations ---- */

static td_status check_parallel(const td_account_parallel *parallel)
{
    td_status status = TD_OK;

    TD_CHECK(parallel, "parallel is NULL");
    TD_TRY(td_account_rate("tokens", parallel->tokens));
    TD_TRY(td_account_rate("d_model", parallel->d_model));
    TD_TRY(td_account_rate("d_ff", parallel->d_ff));
    TD_TRY(td_account_rate("devices", parallel->devices));
    TD_CHECK(parallel->devices >= 1, "devices is %g, needs at least 1", parallel->devices);
    TD_TRY(td_account_rate("flops_per_second", parallel->flops_per_second));
    TD_TRY(td_account_rate("bytes_per_second", parallel->bytes_per_second));
cleanup:
    return status;
}

td_status td_account_parallel_times_of(td_account_strategy strategy, const td_account_parallel *parallel,
                                       td_account_parallel_times *out)
{
    td_status status = TD_OK;
    td_account_parallel_times t = {0};

    TD_CHECK(out, "out is NULL");
    TD_TRY(check_parallel(parallel));

    double n = parallel->devices;
    double weights = parallel->d_model * parallel->d_ff;
    double ratio = parallel->bytes_per_second / parallel->flops_per_second; /* W / C */
    /* Seconds that a ring takes for each byte of a tensor that is sharded N ways. */
    double ring = (n - 1.0) / (n * parallel->bytes_per_second);

    t.forward_compute = 6.0 * parallel->tokens * weights / (n * parallel->flops_per_second);
    t.backward_compute = 2.0 * t.forward_compute;
    switch (strategy) {
    case TD_ACCOUNT_DATA:
        t.forward_comm = 0.0;
        t.backward_comm = 12.0 * weights * ring;
        t.forward_devices = (double)INFINITY;
        t.backward_devices = 1.0 + parallel->tokens * ratio;
        break;
    case TD_ACCOUNT_FSDP:
        t.forward_comm = 6.0 * weights * ring;
        t.backward_comm = 12.0 * weights * ring;
        t.forward_devices = 1.0 + parallel->tokens * ratio;
        t.backward_devices = t.forward_devices;
        break;
    case TD_ACCOUNT_TENSOR:
        t.forward_comm = 4.0 * parallel->tokens * parallel->d_model * ring;
        t.backward_comm = t.forward_comm;
        t.forward_devices = 1.0 + 1.5 * parallel->d_ff * ratio;
        t.backward_devices = 1.0 + 3.0 * parallel->d_ff * ratio;
        break;
    default:
        TD_CHECK(false, "strategy is %d, needs a td_account_strategy", (int)strategy);
    }

    *out = t;
cleanup:
    return status;
}

td_status td_account_fsdp_tensor_devices(const td_account_parallel *parallel, double *overlapped,
                                         double *shared_wire)
{
    td_status status = TD_OK;

    TD_NOT_NULL(overlapped, shared_wire);
    TD_TRY(check_parallel(parallel));
    double ratio = parallel->bytes_per_second / parallel->flops_per_second;
    double fsdp = parallel->tokens * ratio;
    double tensor = 1.5 * parallel->d_ff * ratio;
    *overlapped = (1.0 + fsdp) * (1.0 + tensor);
    /* On one wire 6 F (X - 1) + 4 B (Y - 1) <= 6 B F W / C; X Y is the largest if both terms are equal. */
    double weights = 6.0 * parallel->d_ff, activations = 4.0 * parallel->tokens;
    double half = 0.5 * (weights * fsdp + weights + activations);
    *shared_wire = half / weights * (half / activations);
cleanup:
    return status;
}

td_status td_account_ring_all_reduce(double bytes, int64_t ranks, double bytes_per_second, double *ring,
                                     double *alternate)
{
    td_status status = TD_OK;

    TD_NOT_NULL(ring, alternate);
    TD_TRY(td_account_rate("bytes", bytes));
    TD_TRY(td_account_extent("ranks", ranks));
    TD_TRY(td_account_rate("bytes_per_second", bytes_per_second));
    double hops = (double)(ranks - 1);
    double whole = bytes / bytes_per_second;
    *ring = 2.0 * hops / (double)ranks * whole;
    *alternate = hops * whole;
cleanup:
    return status;
}

td_status td_account_all_reduce_bandwidth(double bytes, int64_t ranks, double seconds, double *algorithm,
                                          double *bus)
{
    td_status status = TD_OK;

    TD_NOT_NULL(algorithm, bus);
    TD_TRY(td_account_rate("bytes", bytes));
    TD_TRY(td_account_extent("ranks", ranks));
    TD_TRY(td_account_rate("seconds", seconds));
    *algorithm = bytes / seconds;
    *bus = *algorithm * 2.0 * (double)(ranks - 1) / (double)ranks;
cleanup:
    return status;
}
