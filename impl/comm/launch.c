#include "comm/launch.h"

#include "base/check.h"
#include "base/key.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** *out = the variable's number; unchanged if the variable is not set. */
static td_status read_number(td_launch_lookup get, const char *name, int32_t *out)
{
    td_status status = TD_OK;
    const char *text = get(name);
    char *end = NULL;

    if (!text)
        return TD_OK;
    const long value = strtol(text, &end, 10);
    TD_CHECK(end != text && *end == '\0' && value >= 0 && value <= INT32_MAX,
             "%s is '%.40s', needs a whole number from 0 to %d", name, text, INT32_MAX);
    *out = (int32_t)value;
cleanup:
    return status;
}

/** *out = the number of ranks on this node; unchanged if the variable is not set. Slurm's list "2(x3),1"
 * means 2 ranks on nodes 0 to 2, and 1 on node 3. */
static td_status read_tasks(td_launch_lookup get, const char *name, int32_t *out)
{
    const char *text = get(name), *at = text;
    td_status status = TD_OK;
    int32_t node = 0;
    int tasks = 0;

    if (!text)
        return TD_OK;
    TD_TRY(read_number(get, "SLURM_NODEID", &node));
    for (int32_t left = node; left >= 0;) {
        int times = 1, used = 0;

        TD_CHECK(sscanf(at, "%d%n", &tasks, &used) == 1 && tasks > 0,
                 "%s is '%.40s', needs a list of numbers with node %d in it", name, text, (int)node);
        at += used;
        used = 0;
        if (sscanf(at, "(x%d)%n", &times, &used) == 1)
            at += used;
        at += *at == ',';
        left -= times > 0 ? times : 1;
    }
    *out = tasks;
cleanup:
    return status;
}

/** out->run = "first.second". A text that is too long is hashed, so that different runs keep different
 * names. */
static void name_run(td_launch *out, const char *first, const char *second)
{
    const char *parts[] = {first ? first : "run", second ? second : ""};
    const size_t most = sizeof out->run - 2, lengths[] = {strlen(parts[0]), strlen(parts[1])};
    td_key key = {{0}};

    if (lengths[0] <= most && lengths[1] <= most - lengths[0]) {
        snprintf(out->run, sizeof out->run, "%s%s%s", parts[0][0] ? parts[0] : "run", second ? "." : "",
                 parts[1]);
        return;
    }
    for (int i = 0; i < 2; i++)
        key = td_key_hash(key, parts[i], lengths[i]);
    td_key_text(key, out->run);
}

enum { MPIRUN, MPIEXEC, LOOP, SRUN, LAUNCHERS };

static const struct {
    const char *launcher, *rank, *ranks, *local_rank, *local_ranks, *run, *part;
} launchers[LAUNCHERS] = {
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "PMIX_NO_SUCH_PART"},
    {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID",
     "PMI_NO_SUCH_PART"},
    {"RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT"},
    {"srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
     "SLURM_JOB_ID", "SLURM_STEP_ID"},
};

/** out->ranks = 0 if the launcher's variables are not set. A job of Slurm sets SLURM_PROCID even if no srun
 * started the process. srun also sets PMI_RANK and PMI_SIZE. If they equal its own values, mpiexec is
 * not counted. */
static td_status read_rank(td_launch_lookup get, int which, td_launch *out)
{
    td_status status = TD_OK;
    td_launch srun;

    *out = (td_launch){.launcher = launchers[which].launcher, .rank = -1, .local_rank = -1};
    if (!get(launchers[which].rank) || !get(launchers[which].ranks))
        return TD_OK;
    TD_TRY(read_number(get, launchers[which].rank, &out->rank));
    TD_TRY(read_number(get, launchers[which].ranks, &out->ranks));
    TD_CHECK(out->ranks >= 1 && out->rank < out->ranks, "%s is %d, needs to be below %s, which is %d",
             launchers[which].rank, (int)out->rank, launchers[which].ranks, (int)out->ranks);
    if (which != MPIEXEC)
        goto cleanup;
    TD_TRY(read_rank(get, SRUN, &srun));
    if (srun.rank == out->rank && srun.ranks == out->ranks)
        out->ranks = 0;
cleanup:
    return status;
}

/** Sets *which to the innermost launcher; LAUNCHERS: none. */
static td_status choose(td_launch_lookup get, td_launch *out, int *which)
{
    const bool torchrun = get(launchers[LOOP].run) != NULL;
    const int order[2][LAUNCHERS] = {{MPIRUN, MPIEXEC, LOOP, SRUN}, {LOOP, MPIRUN, MPIEXEC, SRUN}};
    td_status status = TD_OK;
    td_launch other;

    *which = LAUNCHERS;
    for (int i = 0; i < LAUNCHERS; i++) {
        const int next = order[torchrun][i];

        TD_TRY(read_rank(get, next, &other));
        if (other.ranks > 0 && *which == LAUNCHERS) {
            *which = next;
            *out = other;
            continue;
        }
        const bool differs = out->rank != other.rank || out->ranks != other.ranks;
        TD_CHECK(other.ranks <= 1 || (out->ranks > 1 && !(*which < LOOP && next < SRUN && differs)),
                 "%s and %s say rank %d of %d, %s and %s say rank %d of %d: unset the variables of the "
                 "launcher that did not start this process",
                 launchers[*which].rank, launchers[*which].ranks, (int)out->rank, (int)out->ranks,
                 launchers[next].rank, launchers[next].ranks, (int)other.rank, (int)other.ranks);
    }
cleanup:
    return status;
}

td_status td_launch_read(td_launch_lookup get, td_launch *out)
{
    td_status status = TD_OK;
    int which;

    TD_NOT_NULL(out);
    *out = (td_launch){.launcher = "none", .ranks = 1, .local_ranks = 1};
    TD_CHECK(get, "get is NULL");
    TD_TRY(choose(get, out, &which));
    for (int i = 0; i < SRUN && which == LAUNCHERS; i++) {
        const char *const names[] = {launchers[i].rank, launchers[i].ranks};
        const int set = get(names[0]) ? 0 : 1;

        TD_CHECK(!get(names[set]), "%s is '%.40s', and %s is not set: a rank needs both", names[set],
                 get(names[set]), names[!set]);
    }
    if (which == LAUNCHERS) {
        name_run(out, NULL, NULL);
        goto cleanup;
    }
    TD_TRY(read_number(get, launchers[which].local_rank, &out->local_rank));
    TD_TRY((which == SRUN ? read_tasks : read_number)(get, launchers[which].local_ranks, &out->local_ranks));
    name_run(out, get(launchers[which].run), get(launchers[which].part));
    if (out->local_rank < 0 && (out->local_ranks == 0 || out->local_ranks == out->ranks))
        out->local_rank = out->rank;
cleanup:
    return status;
}
