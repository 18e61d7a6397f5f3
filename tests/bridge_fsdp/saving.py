"""States and checkpoints among numbers of ranks."""

import copy
import glob
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from bridge_fsdp.kit import Gpt, average_in_one_process, check_same, get_fsdp, loss_of, says, seeded


def carry(ranks, rank, folder):
    """States from another number of ranks load with the same bits, and training continues."""
    make = lambda: Gpt(tied=True)  # noqa: E731
    model, alone = get_fsdp(seeded(make, 5)), seeded(make, 5)
    one, other = (torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, alone))
    if ranks > 1:
        state, moments = torch.load(f"{folder}/state.pt")
        taken = model.load_full_state_dict(state)
        assert not taken.missing_keys and not taken.unexpected_keys
        model.load_full_optimizer_state_dict(one, moments)
        mine = model.full_state_dict()
        assert list(mine) == list(state) and all(torch.equal(mine[key], state[key]) for key in state)
        alone.load_state_dict(state)
        other.load_state_dict(copy.deepcopy(moments))  # without a copy the two would share `step`
        says(
            "Missing key",
            lambda: model.load_full_state_dict({k: v for k, v in state.items() if k != "norm.bias"}),
        )
        part = one.state_dict()
        says("exp_avg of tokens.weight is [", lambda: model.load_full_optimizer_state_dict(one, part))
        through_checkpoints(rank, folder, state, moments)
    average_in_one_process(alone, ranks, lambda rank: loss_of(alone, ranks, rank))
    loss_of(model, ranks, rank).backward()
    for optimizer in (one, other):
        optimizer.step()
    check_same(model, alone, exact=ranks <= 2)
    states = model.full_state_dict(), model.full_optimizer_state_dict(one)
    if rank == 0:
        torch.save(states, f"{folder}/state.pt")
    saved, place = (
        {"model": model.state_dict(), "optimizer": one.state_dict()},
        f"{folder}/checkpoint-of-{ranks}",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoints.save(saved, checkpoint_id=place)
        checkpoints.async_save(copy.deepcopy(saved), checkpoint_id=place + "-async").result()
    dist.barrier()


def through_checkpoints(rank, folder, state, moments):
    """torch.distributed.checkpoint loads what another number of ranks saved."""
    for place in glob.glob(f"{folder}/checkpoint-of-{dist.get_world_size() - 1}*"):
        model = get_fsdp(seeded(lambda: Gpt(tied=True), 6))
        one = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss_of(model, 0, rank).backward()
        one.step()  # it has a state that can be loaded into
        saved = {"model": model.state_dict(), "optimizer": one.state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoints.load(saved, checkpoint_id=place)
        model.load_state_dict(saved["model"])
        one.load_state_dict(saved["optimizer"])
        torch.testing.assert_close(model.full_state_dict(), state, rtol=0, atol=0)
        mine = model.full_optimizer_state_dict(one)["state"]
        torch.testing.assert_close(mine, moments["state"], rtol=0, atol=0)
