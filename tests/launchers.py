"""Launchers, alone and one within another: the variables that they set for a process, and its rank by the one rule
of the program and of the bridge. The names are of Open MPI 4.1, MPICH 4, PyTorch 2.13 and Slurm 23.11."""


def mpirun(rank, ranks):
    found = {"PMIX_NAMESPACE": "3053453313"}
    for part in ("", "LOCAL_"):
        found |= {f"OMPI_COMM_WORLD_{part}RANK": str(rank), f"OMPI_COMM_WORLD_{part}SIZE": str(ranks)}
    return found


def mpiexec(rank, ranks):
    found = {"PMI_RANK": str(rank), "PMI_SIZE": str(ranks), "PMI_FD": "9"}
    return found | {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(ranks)}


def loop(rank, ranks):
    return {"RANK": str(rank), "WORLD_SIZE": str(ranks)}


def torchrun(rank, ranks):
    more = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": "29500"}
    return loop(rank, ranks) | more | {"TORCHELASTIC_RUN_ID": "none"}


def srun(rank, ranks):
    found = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"}
    return found | {
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_STEP_ID": "0",
    }


# The variables, and (rank, ranks) or what the refusal says.
TABLE = (
    (mpirun(0, 2), (0, 2)),
    (loop(1, 4), (1, 4)),
    (torchrun(1, 2), (1, 2)),
    (srun(2, 3), (2, 3)),
    (mpirun(0, 1) | torchrun(1, 2), (1, 2)),
    (mpirun(1, 2) | torchrun(2, 4), (2, 4)),
    (srun(0, 1) | torchrun(1, 2), (1, 2)),
    (srun(1, 2) | torchrun(3, 4), (3, 4)),
    (srun(0, 1) | mpirun(1, 2), (1, 2)),
    (srun(0, 2) | mpirun(3, 4), (3, 4)),  # srun started Open MPI's daemons
    (srun(0, 1) | loop(1, 2), (1, 2)),
    (srun(1, 2) | loop(3, 4), (3, 4)),
    (srun(1, 2) | mpirun(0, 2) | torchrun(2, 4), (2, 4)),
    (mpiexec(1, 2), (1, 2)),
    (mpiexec(0, 1) | torchrun(1, 2), (1, 2)),
    (srun(1, 2) | mpiexec(1, 4), (1, 4)),
    (srun(0, 4) | mpiexec(1, 4), (1, 4)),
    (srun(1, 2) | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),  # srun --mpi=pmi2
    (srun(0, 1) | {"PMI_RANK": "0", "PMI_SIZE": "1"} | loop(1, 2), (1, 2)),
    (mpirun(1, 2) | loop(1, 2), (1, 2)),
    (mpirun(1, 2) | loop(0, 1), (1, 2)),  # a shell's for PyTorch
    (mpirun(0, 2) | {"RANK": "3"}, (0, 2)),
    (loop(1, 2) | {"SLURM_PROCID": "0"}, (1, 2)),  # in a job, but not started by srun
    (mpirun(0, 1) | loop(1, 2), "OMPI_COMM_WORLD_SIZE say rank 0 of 1, RANK and WORLD_SIZE say rank 1 of 2: unset"),
    (mpiexec(0, 1) | loop(1, 2), "PMI_RANK and PMI_SIZE say rank 0 of 1, RANK and WORLD_SIZE say rank 1 of 2: unset"),
    (mpirun(0, 2) | mpiexec(1, 2), "say rank 0 of 2, PMI_RANK and PMI_SIZE say rank 1 of 2: unset"),
    (mpirun(0, 4) | loop(0, 2), "say rank 0 of 4, RANK and WORLD_SIZE say rank 0 of 2: unset"),
    (mpirun(1, 2) | loop(0, 2), "say rank 1 of 2, RANK and WORLD_SIZE say rank 0 of 2: unset"),
    (mpirun(1, 2) | torchrun(0, 1), "RANK and WORLD_SIZE say rank 0 of 1, OMPI_COMM_WORLD_RANK"),
    (srun(1, 2) | torchrun(0, 1), "say rank 0 of 1, SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 1 of 2: unset"),
    (srun(1, 2) | mpirun(0, 1), "say rank 0 of 1, SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 1 of 2: unset"),
    (srun(1, 2) | loop(0, 1), "say rank 0 of 1, SLURM_PROCID and SLURM_STEP_NUM_TASKS say rank 1 of 2: unset"),
)  # fmt: skip
