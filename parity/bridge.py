"""libtandem for PyTorch programs: attention, data parallelism and a sharded optimizer, with the interfaces that the
course's tests call.

    o = FlashAttention.apply(q, k, v, is_causal)                          # [batch, seq, d]; differentiable
    model = DataParallel(model)                                           # "naive", "flat", "overlap" or "bucketed"
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    ...
    loss.backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Ranks are those of torch.distributed's default process group, where there is one, else those that mpirun, torchrun or
srun has started. What they send goes through libtandem: NCCL on GPUs, on a CPU MPI under mpirun and Gloo otherwise
(TANDEM_BACKEND names another). The library is build/default's, or TANDEM_LIBRARY's.

Limits are arguments of DataParallel and ShardedOptimizer, or environment variables: open_seconds (TANDEM_OPEN_SECONDS;
60) for all ranks to come, seconds (TANDEM_SECONDS; 30) for a call and for the other ranks to make it. A rank that
waits for 2 s says for what. Ctrl-C ends the wait.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity.core.draw import DTYPES
from parity.core.library import Library, Session, TandemError

NAMES = {kind: name for name, kind in DTYPES.items()}
SENT = ("f64", "f32", "f16", "bf16", "i64")  # types that collectives know
ALIGNMENT = 256  # of what C gets as scratch
# What mpirun, torchrun and srun set: the rank, how many there are, and what names the run.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"),
    ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_PORT"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID"),
)
LIMITS = {"open_seconds": "TANDEM_OPEN_SECONDS", "seconds": "TANDEM_SECONDS"}
MOST_CALLS = 512  # on their way at a time
MOST_BYTES = 32768  # of an exchange


class _Place:
    """A device of PyTorch, in the words that a Session asks for."""

    def __init__(self, device: torch.device):
        self.torch, self.kind = device, device.type
        self.name = f"cuda:{device.index}" if self.kind == "cuda" else "cpu"

    def stream(self) -> int | None:
        return torch.cuda.current_stream(self.torch).cuda_stream if self.kind == "cuda" else None


class _Device:
    """libtandem on a device of PyTorch: what is called is queued on PyTorch's current stream."""

    def __init__(self, device: torch.device):
        self._place = _Place(device)
        self.c = Session(_library(), self._place)
        self._lock = threading.RLock()
        self.limits: dict[str, float] = {}  # that callers named
        self.stopped: BaseException | None = None  # what ended a wait in C: KeyboardInterrupt, mostly
        self.failed = False  # the ranks have; the error was raised
        self._streams = {self._place.stream(): self.c._stream}

    @contextlib.contextmanager
    def calls(self) -> Iterator[Session]:
        """One thread at a time, on that thread's stream."""
        with self._lock:
            native = self._place.stream()
            if native is not None:
                if native not in self._streams:
                    pointer = self.c.ffi.cast("void *", native)
                    self._streams[native] = self.c.value("td_stream_wrap", self.c.device, pointer)
                self.c.td_device_set_stream(self.c.device, self._streams[native])
            try:
                yield self.c
            except TandemError as error:
                self.failed |= error.status == "TD_RANK_FAILED"
                stopped, self.stopped = self.stopped, None
                if stopped is not None:
                    raise stopped from None
                for name, variable in LIMITS.items():
                    if f"; {name} is " in error.message:
                        error.args = (f"{error} ({name}= or {variable} raises it)",)
                raise


@functools.cache
def _library() -> Library:
    path = os.environ.get("TANDEM_LIBRARY")
    return Library(Path(path) if path else None)


@functools.cache
def _device(device: torch.device) -> _Device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"a tensor on {device}: libtandem has kernels for cpu and cuda")
    return _Device(device)


def _device_of(tensor: Tensor) -> _Device:
    return _device(torch.device("cpu") if tensor.device.type == "cpu" else tensor.device)


# ---- attention ----


def _shape(c: Session, q: Tensor, k: Tensor, causal: bool):
    batch, seq, head_dim = q.shape
    tf32 = q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.allow_tf32
    fields = {"seq": seq, "seq_k": k.shape[1], "head_dim": head_dim, "dtype": NAMES[q.dtype]}
    return c.struct("td_attention_shape", {}, batch=batch, heads=1, causal=causal, tf32=tf32, **fields)


def _scratch(like: Tensor, nbytes: int) -> Tensor | None:
    """So many bytes, aligned; None for none."""
    if not nbytes:
        return None
    block = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=like.device)
    return block[-block.data_ptr() % ALIGNMENT :]


def _check_attention(q: Tensor, k: Tensor, v: Tensor) -> None:
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    if q.dim() != 3 or k.dim() != 3 or q.shape[::2] != k.shape[::2] or k.shape != v.shape:
        raise ValueError(f"q, k and v are [batch, seq, d], got {[*q.shape]}, {[*k.shape]} and {[*v.shape]}")
    if q.dtype not in names or not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v are of one type, {', '.join(names.values())}: got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on one device, got {q.device}, {k.device} and {v.device}")
    if q.numel() and not k.numel():
        raise ValueError(f"k and v have no keys, for q {[*q.shape]}: the softmax of nothing is not defined")


@torch.library.custom_op("tandem::flash_forward", mutates_args=())
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """o [batch, seq, d], and the logsumexp of every query [batch, seq], f32."""
    _check_attention(q, k, v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.numel():  # no sequence, or no query
        return o, lse
    with _device_of(q).calls() as c:
        shape = _shape(c, q, k, causal)
        work = _scratch(q, c.value("td_flash_sizes", c.device, shape).forward_work)
        c.td_flash_forward(c.device, shape, q, k, v, o, lse, work)
    return o, lse


@_flash_forward.register_fake
def _(q, k, v, causal):
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("tandem::flash_backward", mutates_args=())
def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, dout: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, o, dout = (x.contiguous() for x in (q, k, v, o, dout))
    if not q.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with _device_of(q).calls() as c:
        shape = _shape(c, q, k, causal)
        work = _scratch(q, c.value("td_flash_sizes", c.device, shape).backward_work)
        c.td_flash_backward(c.device, shape, q, k, v, o, dout, lse.contiguous(), dq, dk, dv, work)
    return dq, dk, dv


@_flash_backward.register_fake
def _(q, k, v, o, dout, lse, causal):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class FlashAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(d)) v, by tiles: `FlashAttention.apply(q, k, v, is_causal=False)`.

    q [batch, queries, d], k and v [batch, keys, d], of any strides; f32 or bf16, on GPUs f16 too; d up to 256. A batch
    may have no sequence, and a sequence no query. Saved are these, o, and L [batch, queries], the logsumexp of each
    query's scores. A causal mask is aligned top left. On a GPU f32 is multiplied as f32, or as TF32 where
    torch.backends.cuda.matmul.allow_tf32 says so."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = torch.ops.tandem.flash_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        return o

    @staticmethod
    def backward(ctx, dout):
        q, k, v, o, lse = ctx.saved_tensors
        return *torch.ops.tandem.flash_backward(q, k, v, o, dout, lse, ctx.is_causal), None


# ---- ranks ----


class _Ranks:
    """A communicator of libtandem among all ranks, on one device."""

    def __init__(self, device: _Device):
        self.device = device
        rank, ranks, run = _who()
        self.rank, self.ranks, self._told = rank, ranks, False
        self.models = itertools.count()  # a number for each DataParallel among these ranks
        self.limits = {name: device.limits.get(name, _seconds_of(name)) for name in LIMITS}
        _signals()
        ffi = device.c.ffi
        self._hears = ffi.callback("bool(void *, double, const char *)", self._hear, onerror=self._stop)
        backend = os.environ.get("TANDEM_BACKEND") or _usual_backend(device)
        with device.calls() as c:
            options = c.struct(
                "td_comm_options",
                {},
                backend=backend,
                rank=rank,
                ranks=ranks,
                run=run,
                directory=os.environ.get("TANDEM_DIRECTORY") or None,
                address=os.environ.get("TANDEM_ADDRESS") or None,
                token=_token(rank, run),
                nccl_host=os.environ.get("NCCL_HOSTID"),
                waiting=self._hears,
                **{name: limit for name, limit in self.limits.items() if limit is not None},
            )
            self.comm = c.value("td_comm_open", c.device, options)

    def _hear(self, _, seconds: float, what) -> bool:
        """C's call waits. Python runs the handlers of signals in here; what they raise goes to _stop. On another
        thread than the main one, as autograd's of a GPU, Python runs none: there an interrupt ends the wait."""
        if seconds >= 2 and not self._told:
            text = self.device.c.ffi.string(what).decode(errors="replace")
            print(f"tandem: rank {self.rank} of {self.ranks} waits: {text}", file=sys.stderr, flush=True)
        self._told = seconds >= 2
        came = signal.SIGINT in _signals_so_far()
        if came and seconds > 0.3 and threading.current_thread() is not threading.main_thread():
            return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        return True

    def _stop(self, _, error: BaseException, trace) -> bool:
        """The wait ends, and calls() raises this in the place of C's error."""
        self.device.stopped = error
        return False

    def broadcast(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Each tensor becomes that of its rank, whatever its type and strides."""
        later, works = [], []
        with self.device.calls() as c:
            for tensor, root in tensors:
                data = tensor.detach()
                flat = data if data.is_contiguous() and NAMES.get(data.dtype) in SENT else _as_words(data)
                work = c.ffi.new("td_work **")
                count, kind = flat.numel(), NAMES[flat.dtype]
                c.td_comm_broadcast(self.comm, flat, count, kind, root, work)
                works.append(work)
                if flat is not data:
                    later.append((data, flat))
                if len(works) == MOST_CALLS:
                    _wait(c, works)
            _wait(c, works)
        for data, flat in later:
            data.copy_(_from_words(flat, data))

    def exchange(self, mine: bytes) -> list[bytes]:
        """Each rank's bytes, as many on every rank, in the order of the ranks. All ranks together."""
        parts = [b""] * self.ranks
        with self.device.calls() as c:
            for begin in range(0, len(mine), MOST_BYTES):
                part = mine[begin : begin + MOST_BYTES]
                got = c.ffi.new("char[]", self.ranks * len(part))
                c.td_comm_exchange(self.comm, c.ffi.from_buffer(part), len(part), got)
                for rank in range(self.ranks):
                    parts[rank] += c.ffi.buffer(got + rank * len(part), len(part))[:]
        return parts

    def carry(self, *state: Any) -> None:
        """The next call carries a hash of this, which ranks compare."""
        with self.device.calls() as c:
            c.td_comm_carry(self.comm, int.from_bytes(_digest(repr(state).encode()), "little"))

    def collect(self, mine: bytes, to: int) -> list[bytes]:
        """On rank `to` each rank's bytes, in the order of the ranks; elsewhere an empty list. All ranks together."""
        parts = []
        for rank, size in enumerate(self.exchange(len(mine).to_bytes(8, "little"))):
            size = int.from_bytes(size, "little")
            words = torch.zeros(-(-size // 8), dtype=torch.int64)
            if rank == self.rank:
                words.view(torch.uint8)[:size] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            words = words.to(self.device.c.on.torch)
            self.broadcast([(words, rank)])
            if self.rank == to:
                parts.append(words.cpu().view(torch.uint8)[:size].numpy().tobytes())
        return parts

    def close(self) -> None:
        """At the end of the process, which is a failure if this fails. A program that failed says so once: the others
        hear of it, and nothing more is raised."""
        failed = self.device.failed or sys.exc_info()[0] is not None or _has_died()
        try:
            with self.device.calls() as c:
                if failed:
                    c.td_comm_abort(self.comm, "its program failed")
                c.td_comm_close(self.comm)
        except BaseException:
            if failed:
                return
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # what Finalize's functions raise does not count


@functools.cache
def _signals() -> int | None:
    """A pipe with the numbers of signals as they come; None: somebody else has them, as an event loop."""
    if threading.current_thread() is not threading.main_thread():
        return None
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    former = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if former == -1:
        return reads
    signal.set_wakeup_fd(former)
    os.close(reads)
    os.close(writes)
    return None


def _signals_so_far() -> bytes:
    """Their numbers since the last call. The first call of a wait finds old ones, too."""
    pipe = _signals()
    with contextlib.suppress(BlockingIOError):
        return os.read(pipe, 4096) if pipe is not None else b""
    return b""


def _has_died() -> bool:
    """Whether the interpreter has printed the error that ends this program."""
    return getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")


def _seconds_of(name: str) -> float | None:
    """A limit of the environment's; None: the library's own."""
    text = os.environ.get(LIMITS[name])
    try:
        return float(text) if text else None
    except ValueError:
        raise ValueError(f"{LIMITS[name]} is '{text}', needs a number of seconds") from None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def _sampled(tensor: Tensor | None) -> bytes:
    """A digest of a tensor's begin and end; of 0 where all of that is 0."""
    if tensor is None:
        return bytes(8)
    flat = (tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).flatten()
    content = torch.cat([flat[:1024], flat[-1024:]]).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return _digest(content) if any(content) else bytes(8)


def _wait(c: Session, works: list) -> None:
    while works:
        c.td_work_queue_wait(works.pop(0)[0])


def _as_words(data: Tensor) -> Tensor:
    """A copy as whole numbers of 8 bytes."""
    raw = data.contiguous().view(-1).view(torch.uint8)
    words = torch.zeros(-(-raw.numel() // 8), dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[: raw.numel()] = raw
    return words


def _from_words(words: Tensor, like: Tensor) -> Tensor:
    raw = words.view(torch.uint8)[: like.numel() * like.element_size()]
    return raw.view(like.dtype).view(like.shape)


def _who() -> tuple[int, int, str]:
    """This rank, how many there are, and a name for this run that no other has."""
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        names = [f"bridge-{os.getpid()}-{os.urandom(16).hex()}"]
        dist.broadcast_object_list(names, src=0)
        return rank, ranks, names[0]
    for rank, ranks, *names in LAUNCHERS:
        if rank in os.environ and ranks in os.environ:
            run = ".".join(os.environ.get(name, "") for name in names)
            return (
                int(os.environ[rank]),
                int(os.environ[ranks]),
                hashlib.sha256(run.encode()).hexdigest()[:16],
            )
    for pair in (pair[:2] for pair in LAUNCHERS[:2] if set(pair[:2]) & set(os.environ)):
        raise RuntimeError(f"no ranks: {' and '.join(pair)} belong together, and one is not set")
    raise RuntimeError(
        "no ranks: call torch.distributed.init_process_group first, or start with torchrun or mpirun"
    )


def _token(rank: int, run: str) -> str | None:
    """What keeps strangers out of a run with an address: random, if torch.distributed spread the run's name, else
    TANDEM_TOKEN's or of the file that TANDEM_TOKEN_FILE names. Rank 0 says if there is none."""
    token, path = os.environ.get("TANDEM_TOKEN"), os.environ.get("TANDEM_TOKEN_FILE")
    address = os.environ.get("TANDEM_ADDRESS")
    if not address:
        return None
    if dist.is_available() and dist.is_initialized():
        return hashlib.sha256(run.encode()).hexdigest()[:32]
    if token is None and path is not None:
        with open(path) as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise PermissionError(f"TANDEM_TOKEN_FILE '{path}' may be read by other users: chmod 600")
            token = file.read().strip()
    if token is None and rank == 0:
        print(
            f"tandem: {address} is not protected: whoever reaches the port can join or end this run; set TANDEM_TOKEN "
            "or TANDEM_TOKEN_FILE",
            file=sys.stderr,
        )
    return token


def _usual_backend(device: _Device) -> str:
    if device.c.on.kind == "cuda":
        return "nccl"
    return "mpi" if "OMPI_COMM_WORLD_RANK" in os.environ else "gloo"


@functools.cache
def _ranks(device: _Device) -> _Ranks:
    """The communicator of a device; it ends with the process, together with the other ranks'."""
    ranks = _Ranks(device)
    Finalize(None, ranks.close, exitpriority=1)  # behind what uses it
    return ranks


def _ranks_within(device: _Device, **limits: float | None) -> _Ranks:
    """The same; limits that are named are what the ranks meet with, and are refused if they have met with others."""
    named = {name: limit for name, limit in limits.items() if limit is not None}
    device.limits |= named
    ranks = _ranks(device)
    for name, limit in named.items():
        if limit != ranks.limits[name]:
            raise ValueError(
                f"{name} is {limit}: the ranks have met with {ranks.limits[name] or 'the default'}"
            )
    return ranks


# ---- data parallelism ----


def _weakly(method: Callable, *first: Any) -> Callable:
    """The method with its first arguments; nothing once its object is no more."""
    found = weakref.WeakMethod(method)

    def call(*rest: Any) -> Any:
        living = found()
        return None if living is None else living(*first, *rest)

    return call


def _memory_order(name: str, tensor: Tensor) -> list[int]:
    """The dimensions as they lie in memory, the slowest first: of channels_last 0, 2, 3, 1."""
    order = list(range(tensor.dim()))
    if not tensor.is_contiguous():
        order.sort(key=tensor.stride, reverse=True)
    if not tensor.permute(order).is_contiguous():
        raise ValueError(f"parameter {name} has strides {tensor.stride()}, which leave gaps or overlap")
    return order


def _release(device: _Device, ddp: Any, hooks: list, parameters: list, gradients: list) -> None:
    """What a DataParallel holds, without the object itself: it may be gone."""
    for hook in hooks:
        hook.remove()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and parameter.grad is gradient:
            parameter.grad = gradient.clone()
    gradients[:] = [None] * len(gradients)
    with device.calls() as c:
        c.td_ddp_destroy(ddp)


class DataParallel(nn.Module):
    """A module whose gradients are averaged over all ranks while backward runs.

    strategy   "naive": each gradient by itself behind the backward pass; "flat": all in one call then; "overlap": each
               as soon as it is there; "bucketed": buckets of bucket_mb, each as soon as its last gradient is there
    bucket_mb  of "bucketed", in 2^20 bytes; None: one bucket
    broadcast_buffers   every forward pass with gradients begins with rank 0's buffers, outside of no_sync()

    Every rank gets rank 0's parameters and buffers. Parameters without elements take no part; others lie in memory in
    any order of their dimensions, without gaps. Gradients live where they are sent from: `.grad` is a view of it,
    also behind zero_grad(set_to_none=True). A parameter that a pass did not use counts as a gradient of 0.

    Each backward pass ends the reduction that it began, so that several may follow each other, as with PyTorch's
    DistributedDataParallel. If this rank used no parameter in a pass, only finish_gradient_synchronization() takes part
    in the other ranks' reduction; call it before the optimizer. Backward passes within no_sync() only add up. The next
    forward pass drops a backward pass that an exception ended.

    Parameters stay the same ones: if one was replaced, unfrozen or frozen since, or has another type, then the next
    pass says so by its name.

    A copy (copy.deepcopy, AveragedModel) and a saved one (torch.save) are of the module alone. They join the ranks in
    their first forward pass with gradients, all ranks together. What this holds is given back by close(), or when
    nobody refers to it."""

    def __init__(
        self,
        module: nn.Module,
        strategy: str = "overlap",
        bucket_mb: float | None = None,
        *,
        broadcast_buffers: bool = True,
        open_seconds: float | None = None,
        seconds: float | None = None,
    ):
        super().__init__()
        self.module = module
        self._options = {"strategy": strategy, "bucket_mb": bucket_mb, "broadcast_buffers": broadcast_buffers}
        self._limits = {"open_seconds": open_seconds, "seconds": seconds}
        self._join()

    def __getstate__(self) -> dict:
        kept = {*vars(nn.Module()), "_options", "_limits"}
        return {name: value for name, value in vars(self).items() if name in kept}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._ddp, self._last, self._joins = None, True, True

    def _join(self) -> None:
        """All ranks together."""
        module = self.module
        parameters = {name: p for name, p in module.named_parameters() if p.numel()}  # a shared one once
        if not parameters:
            raise ValueError("the module has no parameters")
        places = {parameter.device for parameter in parameters.values()}
        if len(places) > 1:
            raise ValueError(f"parameters on {len(places)} devices: {', '.join(sorted(map(str, places)))}")
        self._orders = [_memory_order(name, parameter) for name, parameter in parameters.items()]
        self._parameters_of = list(parameters.values())
        device = _device_of(self._parameters_of[0])
        self._ranks = _ranks_within(device, **self._limits)
        self._model = next(self._ranks.models)
        self._passes = self._finishes = 0  # that ended, and calls of finish_gradient_synchronization()
        self._numbers = {parameter: index for index, parameter in enumerate(self._parameters_of)}
        self._last = True
        self._running = False  # a backward pass has marked gradients
        self._ended = False  # one has since the last finish_gradient_synchronization()
        self._seen: set[int] = set()  # what it has marked
        with self._ranks.device.calls() as c:
            self._c = c
            self._ddp = self._create(c, parameters, self._options["strategy"], self._options["bucket_mb"])
        self._send_buffers()
        self._gradients = [
            self._gradient(i, p) if p.requires_grad else None for i, p in enumerate(self._parameters_of)
        ]
        self._agreed = [
            (p.shape, p.dtype, p.device, None if g is None else g.data_ptr())
            for p, g in zip(self._parameters_of, self._gradients, strict=True)
        ]
        self._hooks = []
        for index, parameter in enumerate(self._parameters_of):
            if parameter.requires_grad:
                before, after = (_weakly(f, index) for f in (self._before_adding, self._ready))
                self._hooks.append(parameter.register_hook(before))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(after))
        held = (self._ranks.device, self._ddp, self._hooks, self._parameters_of, self._gradients)
        self._at_exit = Finalize(self, _release, held, exitpriority=2)
        self._compare_orders(list(parameters))
        self._joins = False
        self._place_gradients()

    def _compare_orders(self, names: list[str]) -> None:
        """The library compares shapes, as they lie in memory: orders may differ where extents are alike."""
        mine = torch.tensor(
            [0, *(dim for order in self._orders for dim in order)], device=self._parameters_of[0].device
        )
        theirs = [mine.clone() for _ in range(self._ranks.ranks)]
        self._ranks.broadcast((orders, rank) for rank, orders in enumerate(theirs))
        for rank, orders in enumerate(theirs):
            rest = orders.tolist()[1:]
            for name, order in zip(names, self._orders, strict=True):
                found, rest = rest[: len(order)], rest[len(order) :]
                if found != order:
                    raise ValueError(
                        f"parameter {name} lies in memory by dimensions {order}, on rank {rank} by {found}"
                    )

    def _send_buffers(self) -> None:
        self._ranks.broadcast((buffer, 0) for buffer in self.module.buffers() if buffer.numel())

    def _create(self, c: Session, parameters: dict, strategy: str, bucket_mb: float | None):
        tensors = c.ffi.new("td_ddp_tensor[]", len(parameters))
        names = []
        for tensor, (name, parameter), order in zip(tensors, parameters.items(), self._orders, strict=True):
            if NAMES.get(parameter.dtype) not in SENT[:4]:
                raise TypeError(f"parameter {name} is of {parameter.dtype}, which is not sent")
            names.append(c.ffi.new("char[]", name.encode()))
            tensor.name, tensor.dims = names[-1], parameter.dim()
            for dim, extent in enumerate(parameter.permute(order).shape):
                tensor.shape[dim] = extent
            tensor.dtype = tensor.grad_dtype = c.enum("td_dtype", NAMES[parameter.dtype])
            tensor.data = c.ffi.cast("void *", parameter.data_ptr())
            tensor.frozen = not parameter.requires_grad
        fields = {"bucket_mb": bucket_mb or 0.0, "strategy": c.value("td_ddp_strategy_parse", strategy)}
        config = c.struct("td_ddp_config", {}, count=len(parameters), **fields)
        config.tensors = tensors
        return c.value("td_ddp_create", c.device, self._ranks.comm, config)

    def _gradient(self, index: int, parameter: Tensor) -> Tensor:
        with self._ranks.device.calls() as c:
            address = c.value("td_ddp_gradient", self._ddp, index)
            order = self._orders[index]
            found = c.tensor(address, parameter.permute(order).shape, NAMES[parameter.dtype])
            return found.permute([order.index(dim) for dim in range(len(order))])

    def _place_gradients(self) -> None:
        """Gradients come to where they are sent from, as 0 if zero_grad() dropped them."""
        for parameter, gradient in zip(self._parameters_of, self._gradients, strict=True):
            if gradient is None or parameter.grad is gradient or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def _check(self, ending: bool = False) -> None:
        """What all ranks agreed on still holds. A frozen parameter does no harm until a pass ends that used others."""
        for name, parameter in self.module.named_parameters():
            if not parameter.numel():
                continue
            index = self._numbers.get(parameter)
            gradient = None if index is None else self._gradients[index]
            change = None
            if parameter.requires_grad and gradient is None:
                change = "is new, or has replaced another" if index is None else "was unfrozen"
            elif gradient is not None:
                now = (parameter.shape, parameter.dtype, parameter.device, gradient.data_ptr())
                if ending and not parameter.requires_grad:
                    change = "was frozen"
                elif now != self._agreed[index]:
                    change = (
                        f"is another tensor now, {parameter.dtype} {[*parameter.shape]} on {parameter.device}"
                    )
            if change:
                raise RuntimeError(
                    f"parameter {name} {change} since DataParallel(...): its gradient stays on this rank; call close() "
                    "and wrap the module again"
                )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # Not if a backward pass calls this, to compute activations again.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.on_train_batch_start()
            if self._ddp is not None and self._last and self._options["broadcast_buffers"]:
                self._send_buffers()
        return self.module(*inputs, **named)

    def _before_adding(self, index: int, _: Tensor) -> None:
        """Autograd is about to add to a gradient. If this pass has marked it already, as reentrant checkpointing may,
        then its reduction ends first. To average again what is the same on all ranks changes nothing."""
        if index in self._seen:
            self._finish()

    def _ready(self, index: int, parameter: Tensor) -> None:
        """A gradient is complete. Autograd calls this within the backward pass."""
        gradient = self._gradients[index]
        if parameter.grad is not gradient:  # made outside of forward()
            gradient.copy_(parameter.grad)
            parameter.grad = gradient
        with self._ranks.device.calls() as c:
            if not self._running:
                self._begin(c)
                self._running = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
            c.td_ddp_ready(self._ddp, index)
        self._seen.add(index)

    def _begin(self, c: Session) -> None:
        c.td_ddp_begin(self._ddp, self._last)
        if self._last:  # the first gradients that are sent name the pass, so that it meets no other
            self._ranks.carry(self._model, self._passes, self._finishes)

    def _end(self) -> None:
        """A backward pass has come to its end."""
        if self._running:
            self._finish()

    def _finish(self) -> None:
        self._check(ending=True)
        self._place_gradients()
        with self._ranks.device.calls() as c:
            if not self._running:
                self._begin(c)
            self._running = False
            for index, gradient in enumerate(self._gradients if self._last else ()):
                if gradient is not None and index not in self._seen:
                    c.td_ddp_ready(self._ddp, index)
            self._seen.clear()
            c.td_ddp_finish(self._ddp)
        self._ended = self._last
        self._passes += self._last

    def finish_gradient_synchronization(self) -> None:
        """After the backward pass, before the optimizer: takes part in the other ranks' reduction, if this rank's
        backward pass used no parameter."""
        if self._joins:
            self._join()
        self._check()
        if self._running or not self._ended:
            self._finish()
        self._ended = False
        self._finishes += 1

    def on_train_batch_start(self) -> None:
        """Before a batch: what an exception left of a backward pass is dropped, and gradients are where they are sent
        from. forward() does the same."""
        if self._joins:
            self._join()
        if self._ddp is None:  # closed
            return
        self._check()
        if self._running:
            with self._ranks.device.calls() as c:
                c.td_ddp_begin(self._ddp, False)  # waits for what is on its way
            self._running = False
            self._seen.clear()
        self._place_gradients()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here are micro-batches before the last: their gradients add up, and nothing is sent."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def close(self) -> None:
        """Gives back what the library holds; `.grad` becomes the module's own. All ranks together."""
        if self._ddp is not None:
            self._ddp = None
            self._at_exit()


# ---- sharded optimizer ----


class ShardedOptimizer(torch.optim.Optimizer):
    """Any optimizer of PyTorch, whose state is split among the ranks: each parameter has an owner, which updates it and
    sends it to all.

    `ShardedOptimizer(params, torch.optim.AdamW, lr=..., ...)`. Groups of parameters with options of their own may be
    given, and added at any time. Owners are chosen by size, the largest first to the rank that has the least. Gradients
    are the same on every rank when step() is called, as DataParallel leaves them.

    All ranks give the same parameters in the same order, and the same hyperparameters at each step; else the step is
    refused on all of them.

    state_dict() is this rank's part. consolidate_state_dict() makes the state of all ranks, which any number of ranks
    and the plain optimizer load."""

    def __init__(
        self,
        params: Iterable,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        open_seconds: float | None = None,
        seconds: float | None = None,
        **options: Any,
    ):
        self._class, self._options = optimizer_cls, options
        self._limits = {"open_seconds": open_seconds, "seconds": seconds}
        self._inner: torch.optim.Optimizer | None = None
        self._owners: dict[Tensor, int] = {}  # in the order of all groups
        self._loads = None
        self._agreed = 0  # parameters that were compared among ranks
        self._whole: dict | None = None  # what consolidate_state_dict() made, until the state changes
        super().__init__(params, dict(options))

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        params = group["params"]
        if self._loads is None:
            self._ranks = _ranks_within(_device_of(params[0]), **self._limits)
            with self._ranks.device.calls() as c:
                self._loads = c.ffi.new("int64_t[]", self._ranks.ranks)
        with self._ranks.device.calls() as c:
            bytes_of = [p.numel() * p.element_size() for p in params]
            owners = c.ffi.new("int32_t[]", len(params))
            c.td_shard_assign(
                len(params), c.ffi.new("int64_t[]", bytes_of), self._ranks.ranks, self._loads, owners
            )
        self._owners |= dict(zip(params, owners, strict=True))
        self._whole = None
        part = self._part(group)
        if self._inner is None:
            self._inner = self._class([part], **self._options)
            self.defaults = self._inner.defaults
        else:
            self._inner.add_param_group(part)
        for name, value in self._inner.param_groups[-1].items():
            group.setdefault(name, value)  # defaults of the class, for schedulers to see

    def _part(self, group: dict) -> dict:
        """A group with this rank's parameters alone. Hyperparameters are kept in self.param_groups only: the inner
        optimizer gets them before each call, and what the call changes is taken back."""
        return _hyper(group) | {"params": [p for p in group["params"] if self._is_mine(p)]}

    def _is_mine(self, parameter: Tensor) -> bool:
        return self._owners[parameter] == self._ranks.rank

    @torch.no_grad()
    def step(self, closure=None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole = None
        self._agree()
        groups = [
            [(key, _plain(value)) for key, value in _hyper(group).items()] for group in self.param_groups
        ]
        self._ranks.carry(self._class.__qualname__, groups)
        self._inner.param_groups = [self._part(group) for group in self.param_groups]
        self._inner.step()
        for part, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            group.update(_hyper(part))
        updated = (p for group in self.param_groups for p in group["params"] if p.requires_grad)
        self._ranks.broadcast((p, self._owners[p]) for p in updated)
        return loss

    def _agree(self) -> None:
        """Before the first step of parameters: all ranks have the same ones, in the same order. If they have no names,
        then their weights and gradients tell them apart."""
        described = self._described()
        if self._agreed == len(described):
            return
        first, self._agreed = self._agreed, len(described)
        new = [*self._owners][first:]
        words = [_digest(repr(sorted(d.items())).encode()) for d in described[first:]]
        data, grads = ([_sampled(x) for x in xs] for xs in (new, [p.grad for p in new]))
        counts = self._ranks.exchange(len(new).to_bytes(8, "little"))
        if len(set(counts)) > 1:
            found = [int.from_bytes(count, "little") for count in counts]
            raise ValueError(f"ranks have other numbers of parameters: {found}")
        every = self._ranks.exchange(b"".join(map(b"".join, zip(words, data, grads, strict=True))))
        for i, described_here in enumerate(described[first:]):
            of_rank_0 = every[0][24 * i : 24 * i + 24]
            for rank, digests in enumerate(every):
                of_rank = digests[24 * i : 24 * i + 24]
                moved = any(of_rank[16:]) and of_rank[16:] in (
                    every[0][24 * j + 16 : 24 * j + 24] for j in range(len(new)) if j != i
                )
                if of_rank[:16] != of_rank_0[:16] or (of_rank[16:] != of_rank_0[16:] and moved):
                    raise ValueError(
                        f"parameter {first + i}, {_say(described_here)} here: rank {rank} has another than rank 0, or "
                        "other weights; every rank gives the same parameters in the same order"
                    )

    def owner(self, parameter: Tensor) -> int:
        """The rank that updates a parameter."""
        return self._owners[parameter]

    # A saved state numbers parameters through all groups, as the plain optimizer's does, and "parameters"
    # describes each. A part also has "rank" and "ranks", and its groups name this rank's parameters only.

    def state_dict(self) -> dict:
        """This rank's part, which only this rank among as many ranks can load. From consolidate_state_dict() to the
        next step(), on the rank that it was for: the state of all ranks."""
        return self._whole or self._saved(whole=False)

    def _saved(self, whole: bool) -> dict:
        numbers = {p: number for number, p in enumerate(self._owners)}
        saved = {
            "state": {numbers.get(key, key): value for key, value in self._inner.state.items()},
            "param_groups": [],
            "parameters": self._described(),
        }
        for group in self.param_groups:
            kept = [whole or self._is_mine(p) for p in group["params"]]
            some = {"params": [numbers[p] for p in itertools.compress(group["params"], kept)]}
            if "param_names" in group:
                some["param_names"] = [*itertools.compress(group["param_names"], kept)]
            saved["param_groups"].append(_hyper(group) | some)
        return saved if whole else saved | {"rank": self._ranks.rank, "ranks": self._ranks.ranks}

    def _described(self) -> list[dict]:
        return [
            {"group": number, "name": name, "shape": [*p.shape], "dtype": str(p.dtype)}
            for number, group in enumerate(self.param_groups)
            for p, name in zip(group["params"], _names(group), strict=True)
        ]

    def consolidate_state_dict(self, to: int = 0) -> dict | None:
        """The state of all ranks, in the CPU's memory on rank `to`; None elsewhere. All ranks call it together. Until
        the next step(), state_dict() gives it too, as PyTorch's ZeroRedundancyOptimizer does."""
        if not 0 <= to < self._ranks.ranks:
            raise ValueError(f"to is rank {to} of {self._ranks.ranks}")
        saved = self._saved(whole=True)
        mine = io.BytesIO()
        torch.save(saved["state"], mine)
        self._whole = None
        for part in self._ranks.collect(mine.getvalue(), to):
            self._whole = self._whole or saved | {"state": {}}
            # Pickled by the ranks of this run.
            self._whole["state"] |= torch.load(io.BytesIO(part), map_location="cpu", weights_only=False)
        return self._whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads this rank's part, or a state of all ranks: that of consolidate_state_dict() or of the plain optimizer.
        Each rank loads by itself. ValueError: the part of another rank, of another number of ranks, or of other
        parameters; nothing was loaded then."""
        rank, ranks = self._ranks.rank, self._ranks.ranks
        whole = state_dict.get("ranks", 1) == 1
        if not whole and (state_dict["rank"], state_dict["ranks"]) != (rank, ranks):
            raise ValueError(
                f"the state is that of rank {state_dict['rank']} of {state_dict['ranks']}, this is rank {rank} of "
                f"{ranks}: load this rank's own, or one that consolidate_state_dict() made"
            )
        self._check_parameters(state_dict, whole)
        groups = []
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            kept = map(self._is_mine, group["params"]) if whole else itertools.repeat(True)
            groups.append(_hyper(saved) | {"params": [*itertools.compress(saved["params"], kept)]})
        mine = {key for group in groups for key in group["params"]}
        state = {key: value for key, value in state_dict["state"].items() if key in mine}
        self._inner.param_groups = [self._part(group) for group in self.param_groups]
        self._inner.load_state_dict({"state": state, "param_groups": groups})
        for part, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            for name in _hyper(group):
                del group[name]
            group.update(_hyper(part))
        self._whole = None

    def _check_parameters(self, state_dict: dict, whole: bool) -> None:
        mine = self._described()
        described = state_dict.get("parameters")
        if described is not None:
            if len(described) != len(mine):
                raise ValueError(f"the state has {len(described)} parameters, the optimizer has {len(mine)}")
            for number, (saved, here) in enumerate(zip(described, mine, strict=True)):
                if not (saved["name"] and here["name"]):
                    saved, here = saved | {"name": None}, here | {"name": None}
                if saved != here:
                    raise ValueError(f"parameter {number}: the state has {_say(saved)}, here is {_say(here)}")
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        here = [len(group["params"] if whole else self._part(group)["params"]) for group in self.param_groups]
        if sizes != here:
            raise ValueError(f"the state's groups have {sizes} parameters, the optimizer's have {here}")


def _hyper(group: dict) -> dict:
    """What a group of an optimizer has beside its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _plain(value: Any) -> Any:
    """A hyperparameter in words that are the same on every rank. One on a GPU is not looked at: that would wait."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" else str(value.dtype)
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__qualname__


def _names(group: dict) -> Iterable[str | None]:
    return group.get("param_names") or [None] * len(group["params"])


def _say(described: dict) -> str:
    name = f"{described['name']!r}, " if described["name"] else ""
    return f"{name}{described['dtype']} {described['shape']} of group {described['group']}"
