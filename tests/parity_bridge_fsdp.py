"""Fully sharded data parallelism of the bridge: the contract of the course's tests, and common uses of FSDP.

Four processes are started once. They run the cases of one, two, three and four ranks one after the other. A case is
compared with one process that averages the gradients of all ranks' batches."""

import tempfile
import unittest
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from bridge_fsdp.memory import checkpoint_and_memory, fail, prefetch_and_memory
from bridge_fsdp.refusals import calls_of_pytorch, misuse, other_modules, what_differs_by_rank
from bridge_fsdp.saving import carry
from bridge_fsdp.training import (
    accumulate,
    beside_data_parallel,
    compiled,
    contract,
    example,
    hooks_and_ends,
    overflow,
    read_weights_of_others,
    train,
    use_other_parameters,
)

import tandem as bridge

TRAINING = [train, accumulate, carry]
CASES = {
    1: TRAINING,
    2: [
        *TRAINING,
        beside_data_parallel,
        contract,
        prefetch_and_memory,
        checkpoint_and_memory,
        compiled,
        fail,
        read_weights_of_others,
        hooks_and_ends,
        misuse,
        calls_of_pytorch,
        what_differs_by_rank,
        overflow,
        use_other_parameters,
        example,
    ],
    3: TRAINING,
    4: [train, carry, other_modules],  # the last one: its errors end the ranks' communicators
}


def a_rank(rank, folder):
    warnings.simplefilter("error")  # as in the course's tests
    torch.set_num_threads(1)
    for ranks, cases in CASES.items():
        if rank >= ranks:
            continue
        dist.init_process_group("gloo", init_method=f"file://{folder}/{ranks}", rank=rank, world_size=ranks)
        for case in cases:
            try:
                case(ranks, rank, folder) if case is carry else case(ranks, rank)
            except BaseException as error:
                error.add_note(f"in {case.__name__} of rank {rank} of {ranks}")
                raise
        dist.barrier()
        bridge.ranks.ranks_of.cache_clear()
        dist.destroy_process_group()


class FullySharded(unittest.TestCase):
    def test_all_cases_on_one_to_four_ranks(self):
        with tempfile.TemporaryDirectory(prefix="tandem-fsdp-") as folder:
            torch.multiprocessing.set_forkserver_preload(
                ["torch._dynamo", "torch.distributed.checkpoint", "tandem.fsdp"]
            )
            torch.multiprocessing.start_processes(a_rank, (folder,), max(CASES), start_method="forkserver")


if __name__ == "__main__":
    unittest.main(verbosity=2)
