"""What the handouts ask for, in their order: the rows of every index. An id whose parts are answered by several modules
has a row for each; a record's deliverable is the id alone."""

HANDOUTS = {
    "2025": (
        "benchmarking_script",
        "nsys_profile",
        "mixed_precision_accumulation",
        "benchmarking_mixed_precision (a, b)",
        "benchmarking_mixed_precision (c)",
        "memory_profiling",
        "pytorch_attention",
        "torch_compile (a)",
        "torch_compile (b)",
        "flash_forward",
        "flash_backward",
        "flash_benchmarking",
        "leaderboard",
        "distributed_communication_single_node",
        "naive_ddp",
        "naive_ddp_benchmarking",
        "minimal_ddp_flat_benchmarking",
        "ddp_overlap_individual_parameters",
        "ddp_overlap_individual_parameters_benchmarking",
        "ddp_overlap_bucketed",
        "ddp_bucketed_benchmarking (a)",
        "ddp_bucketed_benchmarking (b)",
        "communication_accounting",
        "optimizer_state_sharding",
        "optimizer_state_sharding_accounting",
    ),
    "2026": (
        "gradient_checkpointing",
        "fsdp",
        "fsdp_accounting",
        "alternate_ring_all_reduce",
        "data_parallel_calcs",
        "fsdp_calcs",
        "tp_calcs",
        "fsdp_tp_calcs",
        "leaderboard (2026)",
    ),
}


def deliverable_of(row: str) -> str:
    """What the records of a row call it."""
    return row.partition(" (")[0]
