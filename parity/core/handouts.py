"""What the handouts ask, in their order and in our words: the rows of the write-ups and of every index. A row is an id,
with the letter of its part where it has parts; a record's deliverable is the id alone."""

from collections.abc import Mapping

VERSIONS = {"2026": "26.1.4", "2025": "1.0.4 (its code: 1.0.5)"}
ASKED = {
    "2025": {
        "benchmarking_script (a)": "Which script times forward and backward passes?",
        "benchmarking_script (b)": "How long do forward and backward take for each size, and how much do they vary?",
        "benchmarking_script (c)": "What do fewer warm-up steps change, and why?",
        "nsys_profile (a)": "How long is the forward pass by the profiler, and does the clock agree?",
        "nsys_profile (b)": "Which kernel takes the most time, how often is it called, and is it the same "
        "with backward?",
        "nsys_profile (c)": "Which other kernels take time in the forward pass?",
        "nsys_profile (d)": "How does the share of matrix products change from inference to a training step?",
        "nsys_profile (e)": "How does softmax compare with the products of attention, in time and in FLOPs?",
        "mixed_precision_accumulation": "What are the four sums, and why do they differ?",
        "benchmarking_mixed_precision (a)": "Which dtypes does the toy model have under f16 autocast?",
        "benchmarking_mixed_precision (b)": "Which part of layer norm is sensitive to precision, and is bf16 enough?",
        "benchmarking_mixed_precision (c)": "How long do forward and backward take with and without bf16?",
        "memory_profiling (a)": "What does memory look like over a forward pass and over a training step?",
        "memory_profiling (b)": "What is the peak of each context, for a forward pass and for a training step?",
        "memory_profiling (c)": "What does mixed precision change about the peaks?",
        "memory_profiling (d)": "How large is one tensor of the residual stream?",
        "memory_profiling (e)": "Which tensors of the forward pass are the largest, and where do they come from?",
        "pytorch_attention": "How long does attention take by length and head size, when does memory end, "
        "and what helps?",
        "torch_compile (a)": "What does compiling change about attention?",
        "torch_compile (b)": "What does compiling change about the whole model?",
        "flash_forward": "Does the fused forward pass give the output and the logsumexp?",
        "flash_backward": "Does the fused backward pass give the gradients?",
        "flash_benchmarking": "How long do fused and plain attention take by length, head size and dtype?",
        "leaderboard": "How long is one call of forward and backward at the leaderboard's shape?",
        "distributed_communication_single_node": "How long does an all-reduce take by backend, size and "
        "number of ranks?",
        "naive_ddp": "Does naive data parallelism give the weights of one process?",
        "naive_ddp_benchmarking": "How long is a step with naive data parallelism, and what part is communication?",
        "minimal_ddp_flat_benchmarking": "What does one all-reduce of all gradients change?",
        "ddp_overlap_individual_parameters": "Does overlap of single gradients give the weights of one process?",
        "ddp_overlap_individual_parameters_benchmarking (a)": "What does overlap of single gradients change?",
        "ddp_overlap_individual_parameters_benchmarking (b)": "How do the traces of naive and overlapped steps differ?",
        "ddp_overlap_bucketed": "Do buckets give the weights of one process?",
        "ddp_bucketed_benchmarking (a)": "How does a step depend on the bucket size, and does that meet the "
        "expectation?",
        "ddp_bucketed_benchmarking (b)": "What is the overhead by a model, and which bucket size is the best?",
        "communication_accounting": "XXL: how much memory, how many devices, which batch, and what makes it smaller?",
        "optimizer_state_sharding": "Does a sharded optimizer give the weights of one optimizer?",
        "optimizer_state_sharding_accounting (a)": "Where does memory go, with and without sharding, at three points?",
        "optimizer_state_sharding_accounting (b)": "How long is a step with and without sharding?",
        "optimizer_state_sharding_accounting (c)": "How does this differ from ZeRO stage 1?",
    },
    "2026": {  # what is new
        "memory_profiling (f)": "What does one block save for its backward pass?",
        "gradient_checkpointing": "Which checkpoints need the least memory, and what do they cost?",
        "fsdp": "Do fully sharded weights give the weights of one process?",
        "fsdp_accounting": "What memory does full sharding save, and do gathers finish in time?",
        "alternate_ring_all_reduce": "How long is a ring all-reduce that passes whole buffers on?",
        "data_parallel_calcs": "Data parallelism: when does compute hide communication?",
        "fsdp_calcs": "Fully sharded weights: when does compute hide communication?",
        "tp_calcs": "Tensor parallelism: when does compute hide communication?",
        "fsdp_tp_calcs": "Both together: when does compute hide communication?",
        "leaderboard (2026)": "How long is a training step of the 8B model on two GPUs?",
    },
}
# How many sentences an answer may have, if a handout says so; the others stand under its table as notes.
SENTENCES = {
    **dict.fromkeys(("benchmarking_script (b)", *(f"nsys_profile ({part})" for part in "abcde")), 2),
    **dict.fromkeys(("memory_profiling (d)", "memory_profiling (e)", "minimal_ddp_flat_benchmarking"), 2),
    "ddp_overlap_individual_parameters_benchmarking (a)": 2,
    **dict.fromkeys(("benchmarking_script (c)", "mixed_precision_accumulation"), 3),
    **dict.fromkeys((f"benchmarking_mixed_precision ({part})" for part in "bc"), 3),
    **dict.fromkeys((f"memory_profiling ({part})" for part in "ac"), 3),
    "distributed_communication_single_node": 3,
    **dict.fromkeys((f"optimizer_state_sharding_accounting ({part})" for part in "abc"), 3),
    "pytorch_attention": 8,  # two paragraphs
    "communication_accounting": 10,  # three sentences and a paragraph
    "gradient_checkpointing": 10,  # twice five
    "fsdp_accounting": 6,  # twice three
    "alternate_ring_all_reduce": 1,
}
USUAL = 4
QUESTIONS = {row: question for rows in ASKED.values() for row, question in rows.items()}
GONE = ("ddp_overlap_bucketed", "ddp_bucketed_benchmarking", "communication_accounting", "leaderboard")
TWO_GPUS = (
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters_benchmarking",
    "optimizer_state_sharding_accounting",
)
# The xl of 2026, which records and the program call 2.7B. The xl of 2025 is another model.
OLD_XL, XL = "xl", "2.7B"
# What 2026 asks of ids that both handouts have: the records that its answer is formed from.
NARROWED: dict[str, Mapping[str, tuple]] = {
    "benchmarking_script": {},
    "torch_compile": {},
    "gradient_checkpointing": {},
    "fsdp_accounting": {},
    # A table of 2026 also shows the buckets of 2025.
    **{name: {} for name in (*TWO_GPUS, "ddp_bucketed_benchmarking")},
    "benchmarking_mixed_precision": {},
    "nsys_profile": {"size": ("small", XL), "context": (256, 512, 1024)},
    "memory_profiling": {"context": (128, 2048)},
}
SAME = ("benchmarking_script (a)", "benchmarking_mixed_precision (a)", "benchmarking_mixed_precision (b)")
SAME += ("torch_compile (a)",)
# Of rows of 2026 that a machine may lack: the module and the cases that measure them, on GPUs with 141 GB.
COMMANDS = {
    **dict.fromkeys(("benchmarking_script", "benchmarking_mixed_precision"), ("bench", "size=10B")),
    "memory_profiling": ("memory", "context=2048"),
}
NOT_10B = ("benchmarking_script (b)", "benchmarking_mixed_precision (c)")


def command_of(row: str) -> str:
    module, cases = COMMANDS[deliverable_of(row)]
    how = f"--profile full --device cuda --module {module} --case '{deliverable_of(row)}/.*{cases}'"
    return f"python -m parity run {how}"


def rows_of_2026() -> list[str]:
    """All rows of 2026: the rows of 2025 that it keeps, and its new rows."""
    rows = [row for row in ASKED["2025"] if deliverable_of(row) not in GONE]
    first, second, *others = ASKED["2026"]
    after = rows.index("memory_profiling (e)") + 1
    return [*rows[:after], first, second, *rows[after:], *others]


def deliverable_of(row: str) -> str:
    """What the records of a row call it."""
    return row.partition(" (")[0]


def is_same(row: str) -> bool:
    """Whether both handouts ask the row with the same sizes."""
    return row in SAME or deliverable_of(row) not in NARROWED


def is_asked(record: Mapping) -> bool:
    """Whether the answers of 2026 are formed from a record. A CPU's have its own sizes and contexts."""
    case, narrow = record["case"], NARROWED.get(record["deliverable"])
    if narrow is None:
        return True
    narrow = narrow if "device" in record else {}
    return case.get("size") != OLD_XL and all(case.get(key) in among for key, among in narrow.items())


def is_new(record: Mapping) -> bool:
    """Whether only 2026 asks for the record's size."""
    size = record["case"].get("size")
    return size == "10B" or (size == XL and record["deliverable"] in TWO_GPUS)


HANDOUTS = {"2026": {row: QUESTIONS[row] for row in rows_of_2026()}, "2025": ASKED["2025"]}
