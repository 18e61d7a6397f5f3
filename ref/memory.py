"""The handout's memory_profiling in PyTorch: one pass, the sizes of its tensors, and tensors saved for backward."""

import torch
from torch import Tensor, nn

from ref.transformer import AdamW, Transformer, cross_entropy

PASSES = ("inference", "forward", "step")


class Recorded:
    """A model with a batch and an optimizer, ready for one pass."""

    def __init__(self, model: Transformer, ids: Tensor, targets: Tensor, autocast: bool = False):
        self.model, self.ids, self.targets = model, ids, targets
        self.autocast = torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast)
        self.optimizer = AdamW(model.parameters())

    def run(self, what: str) -> Tensor:
        """Runs one of PASSES. "forward" returns the loss, which keeps all tensors for its backward alive."""
        if what == "inference":
            with torch.no_grad(), self.autocast:
                return self.model(self.ids)
        with self.autocast:
            loss = cross_entropy(self.model(self.ids), self.targets)
        if what == "step":
            loss.backward()
            self.optimizer.step()
            loss = loss.detach()
        return loss

    def settle(self) -> None:
        """Runs a first step, so that moments exist and gradients do not, as before any later step."""
        self.run("step")
        self.model.zero_grad(set_to_none=True)

    def holds(self) -> list[Tensor]:
        moments = [
            x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)
        ]
        return [*self.model.parameters(), *moments]


def saved_by(block: nn.Module, *inputs: Tensor) -> list[tuple[list[int], int]]:
    """Shape and bytes of each tensor that autograd keeps of one block for its backward, the largest first. Each storage
    counts once. Weights do not count, but autocast's 16-bit copies of weights do."""
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    found: dict[int, tuple[list[int], int]] = {}
    kept: list[Tensor] = []  # keeps storages alive, so that no two tensors get the same one

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and storage.nbytes() > 0:
            found.setdefault(storage.data_ptr(), (list(x.shape), storage.nbytes()))
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = block(*inputs)
    del output
    return sorted(found.values(), key=lambda entry: -entry[1])


def sizes(model: Transformer, ids: Tensor) -> dict[str, int]:
    """Bytes in a pass of one tensor of the residual stream, one layer's score matrix, one hidden tensor of the
    feed-forward, and the logits."""
    found: dict[str, int] = {}
    block = model.layers[0]

    def residual(module, inputs, output):
        found["residual"] = inputs[0].nbytes

    def hidden(module, inputs, output):
        found["ffn"] = output.nbytes

    def attend(q, k, v, causal):
        found["scores"] = (q @ k.mT).nbytes
        return ours(q, k, v, causal)

    hooks = [block.register_forward_hook(residual), block.ffn.w1.register_forward_hook(hidden)]
    ours, block.attn.attend = block.attn.attend, attend
    with torch.no_grad():
        found["logits"] = model(ids).nbytes
    block.attn.attend = ours
    for hook in hooks:
        hook.remove()
    return found
