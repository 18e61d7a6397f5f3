"""The model of both sides, for every module that runs it: its switches, its weights, and C's training step.

`load_state_dict` and `state_dict` carry a PyTorch state dict into a td_transformer and back.
"""

import contextlib
import functools
import math
import os

import torch

from parity.core import DTYPES, NAMES, Drawn, sampled, within
from ref import ddp
from ref import transformer as ref

ADAMW = dict(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)


def c_switches(graph=False, keep="most", gradients="held", update="after", **more):
    """Of a step of libtandem. keep: what forward keeps for backward: "all"; "most", without the norms' outputs and
    silu(gate) up; the "inputs" of checkpoints of `checkpoint_layers` layers; or "attention": inputs and attention's
    results. The last `kept_layers` layers do not run again. gradients: "held"; "shared" by units of full sharding; or
    "transient", in the memory of dead activations. update: "after" the backward pass, "along" with it or "none"."""
    return dict(graph=graph, keep=keep, gradients=gradients, update=update, **more)


# Of a timed step, in relative L2: how far its loss, logits and updates of a weight tensor may be from the
# right ones. AdamW's first steps move a weight fully even if rounding decides the sign of its gradient. So
# updates of one step of `small` in mixed precision are off float64's by up to 0.11, in PyTorch as in C.
TIMED_WITHIN = {"f32": (1e-4, 1e-4, 0.2), "tf32": (1e-3, 0.01, 0.3), "16 bits": (0.01, 0.05, 0.5)}

# The step whose time the pages boast of.
AS_TIMED = c_switches(graph=True, keep="all", gradients="transient", update="along")


def train_options(switches, attention="flash"):
    """The fields of td_train_config that say the same, `attention` if the switches do not name one."""
    update = switches.get("update", "none")
    return {
        "until": "backward" if update == "none" else "update",
        "time": "along" if update == "along" else "after",
        "capture": switches["graph"],
        "update_sms": switches.get("update_sms", 0),
        "model": {
            "size": {},
            "attention": switches.get("attention", attention),
            "keep": switches.get("keep", "most"),
            "checkpoint_layers": switches.get("checkpoint_layers", 0),
            "kept_layers": switches.get("kept_layers", 0),
            "transient_gradients": switches.get("gradients", "held") != "held",
        },
    }


def torch_switches(dtype, compiled=False, graph=False):
    return dict(compiled=compiled, graph=graph, autocast=dtype == "bf16_mixed")


def parameters(c, model):
    """name: td_parameter, in state-dict order."""
    count = c.td_transformer_parameter_count(model)
    found = (c.value("td_transformer_parameter", model, index) for index in range(count))
    return {c.ffi.string(parameter.name).decode(): parameter for parameter in found}


def load_state_dict(c, model, state):
    """Uploads a PyTorch state dict; names, order and shapes must be the model's."""
    mine = parameters(c, model)
    if list(mine) != list(state):
        raise ValueError(f"state dict has {len(state)} tensors, the model {len(mine)}, or other names")
    for index, (name, parameter) in enumerate(mine.items()):
        tensor = state[name].detach().contiguous()
        if tensor.shape != shape_of(parameter):
            raise ValueError(f"{name} is {list(tensor.shape)}, the model's {list(shape_of(parameter))}")
        if c.enum("td_dtype", NAMES[tensor.dtype]) != parameter.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, the model's is another")
        c.td_transformer_write(model, index, tensor)


def state_dict(c, model, what="data", read=None, take=lambda x: x):
    """New tensors of the parameters, or with what="grad" of gradients. `read` fills that of an index. `take`: what is
    kept of each."""
    read = read or functools.partial(c.td_transformer_read, model)
    state = {}
    for index, (name, parameter) in enumerate(parameters(c, model).items()):
        dtype = c.ffi.string(c.td_dtype_name(parameter.grad_dtype if what == "grad" else parameter.dtype))
        tensor = torch.empty(shape_of(parameter), dtype=DTYPES[dtype.decode()], device=c.on.torch)
        if what == "grad":
            c.td_device_copy(c.device, tensor, parameter.grad, tensor.nbytes)
        else:
            read(index, tensor)
        state[name] = take(tensor)
    return state


def shape_of(parameter):
    return torch.Size((parameter.rows, parameter.cols) if parameter.cols else (parameter.rows,))


class TandemTrainer:
    """A td_train and its model, run with these switches. `options` are further fields of its configuration."""

    def __init__(self, case, c, attention, switches, **options):
        self.c, self.case = c, case
        hyper = {"kind": "adamw", "adamw": {"variant": "course2025", **ADAMW}}
        fields = train_options(switches, attention) | {"hyper": hyper} | options
        self.config = c.struct("td_train_config", case, **fields)
        self.train = self.model = None

    def open(self):
        self.train = self.c.create("td_train_create", self.c.device, self.config)
        self.model = self.c.td_train_model(self.train)
        return self

    def update_sms(self):
        """The SMs of a GPU on which weights are updated along the backward pass; 0: all."""
        return self.c.value("td_train_update_sms", self.c.device, self.config)

    def close(self):
        if self.train is not None:
            self.c.destroy(self.train)
        self.train = self.model = None

    def begin(self, state):
        """These weights, no moments, step 0."""
        load_state_dict(self.c, self.model, state)
        self.c.td_train_reset(self.train)

    def load(self, ids, targets):
        self.c.td_train_load(self.train, ids, targets, *ids.shape)

    def forward(self):
        """And the loss, of what was loaded. Returns the logits."""
        logits = self.c.ffi.new("void **")
        self.c.td_train_forward(self.train, logits)
        return logits[0]

    def logits(self, ids, targets):
        self.load(ids, targets)
        return self.read(self.forward(), ids.shape)

    def read(self, logits, shape):
        dtype = self.case.dtype.removesuffix("_mixed")  # of the products
        return self.c.tensor(logits, (*shape, self.case.vocab), dtype)

    def backward(self):
        self.c.td_train_backward(self.train)

    def update(self):
        self.c.td_train_update(self.train)

    def step(self, ids, targets):
        """A whole step, without waiting for the loss. ids and targets are of all micro-batches."""
        batch = len(ids) // self.case.get("micro_batches", 1)
        self.c.td_train_step(self.train, ids, targets, batch, ids.shape[1])

    def moments(self):
        """The first moments by name, as new tensors. After the first step they are (1 - beta1) times the gradient."""
        found, optimizer = {}, self.c.td_train_optimizer(self.train)
        for name, parameter in parameters(self.c, self.model).items():
            pointers = self.c.ffi.new("float *[2]")
            self.c.td_optimizer_moments(optimizer, parameter.offset, pointers, pointers + 1)
            found[name] = torch.empty(shape_of(parameter), device=self.c.on.torch)
            self.c.td_device_copy(self.c.device, found[name], pointers[0], found[name].nbytes)
        return found

    def loss(self):
        """Of the last step, or forward pass."""
        loss = self.c.value("td_train_loss", self.train)
        return torch.tensor([loss], device=self.c.on.torch)


def sizes_of(case):
    return case.d_model, case.d_ff, case.layers, case.heads, case.vocab, case.context


def empty_model(case, device, dtype=None, **options):
    """PyTorch's model in the case's dtype or another. Its initial weights are not drawn, because that takes seconds."""
    with torch.device("meta"):
        model = ref.Transformer(*sizes_of(case), **options)
    return model.to(dtype or DTYPES[case.dtype]).to_empty(device=device)


@torch.no_grad()
def noise_model(case, device):
    """PyTorch's model, whose weights are noise that the device draws: for passes whose values do not matter."""
    model = empty_model(case, device)
    for p in model.parameters():
        p.normal_(0.0, 0.02)
    return model


def torch_model(case, state, dtype=None, **options):
    """PyTorch's model with these weights, on their device."""
    model = empty_model(case, next(iter(state.values())).device, dtype, **options)
    copy_weights(model, state)
    return model


@torch.no_grad()
def copy_weights(model, state):
    """One after the other: each may be drawn when it is read."""
    for name, p in model.named_parameters():
        p.copy_(state[name])


def timed_rules(case):
    limits = TIMED_WITHIN.get(case.dtype, TIMED_WITHIN["16 bits"])
    return {
        name: within(rel_l2=limit) for name, limit in zip(("loss", "logits", "update.*"), limits, strict=True)
    }


def moved(state, samples):
    """How far sampled weights are from those of `state`."""
    return {f"update.{name}": (x.double() - sampled(state[name]).double()) for name, x in samples.items()}


def autocast(case, device):
    """What PyTorch does for bf16_mixed, and nothing for any other dtype."""
    return torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bf16_mixed")


def torch_options(adamw=ADAMW):
    options = {name: adamw[name] for name in ("lr", "eps", "weight_decay")}
    return options | {"betas": (adamw["beta1"], adamw["beta2"])}


def clip(case, parameters):
    if "clip" in case:
        torch.nn.utils.clip_grad_norm_(parameters, case.clip)


def trained_alone(case, state, batches, optimizer_of, dtype=None):
    """(losses of each step and rank, weights) of one process that averages the ranks' gradients."""
    model = torch_model(case, state, dtype)
    optimizer = optimizer_of(case, ddp.trained(model))
    device = next(model.parameters()).device
    losses, micros = [], case.get("micro_batches", 1)

    def loss_of(ids, targets):
        with contextlib.nullcontext() if dtype else autocast(case, device):
            parts = zip(ids.chunk(micros), targets.chunk(micros), strict=True)
            return sum(ref.cross_entropy(model(i), t) for i, t in parts) / micros

    for batch in batches:
        losses.append(ddp.average_alone(model, (loss_of(*of_rank) for of_rank in batch)))
        clip(case, model.parameters())
        optimizer.step()
    return losses, model.state_dict()


def forget(optimizer):
    """Back to step 0, in the tensors that a captured step reads."""
    for state in optimizer.state.values() if optimizer else ():
        state.update({key: x.zero_() if isinstance(x, torch.Tensor) else 0 for key, x in state.items()})


def torch_adamw(model):
    return ref.AdamW(model.parameters(), variant="course2025", **torch_options())


def draw_batch(case, draw, name="tokens"):
    """Token ids and the tokens that follow them, of all micro-batches of a step."""
    sequences, seq = case.batch * case.get("micro_batches", 1), case.get("seq", case.context)
    return ids_and_targets(draw.integers(name, (sequences, seq + 1), high=case.vocab))


def ids_and_targets(tokens):
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def updates(state, weights, dtype=torch.float32):
    """How far each weight moved."""
    return {f"update.{name}": (weights[name].double() - state[name].double()).to(dtype) for name in state}


@contextlib.contextmanager
def quick_start(c, ranks=1):
    """While C draws its own weights for a GPU, it uses all threads of the host, shared by the ranks."""
    threads = c.td_cpu_threads()
    if c.on.name != "cpu":
        c.td_cpu_set_threads(max(threads, len(os.sched_getaffinity(0)) // ranks))
    try:
        yield
    finally:
        c.td_cpu_set_threads(threads)


def initial_state(case, normal):
    """Weights of the course's spread, by draw.normal or draw.quickly. A norm's weights are random too, not 1."""
    with torch.device("meta"):
        model = ref.Transformer(*sizes_of(case))
    state = {}
    for name, p in model.named_parameters():
        mean, std = (1.0, 0.1) if p.dim() == 1 else (0.0, math.sqrt(2 / sum(p.shape)))
        state[name] = normal(name, p.shape, case.dtype, mean=mean, std=1.0 if "embeddings" in name else std)
    return Drawn(state) if callable(state[name]) else state
