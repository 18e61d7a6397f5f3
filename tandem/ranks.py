"""The ranks of a program: who they are, how long they wait for each other, and what they send."""

import contextlib
import functools
import hashlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .device import LIMITS, SENT, Device
from .library import NAMES, Session, TandemError

MOST_CALLS = 512  # on their way at a time
MOST_BYTES = 32768  # of an exchange


class Call:
    """A collective on its way. It holds the memory that the collective reads and writes until it is done."""

    def __init__(self, ranks: "Ranks", name: str, result: Tensor, *arguments: Any, carried: Any = None):
        self._device, self._arguments, self._work, self.result = ranks.device, arguments, None, result
        with ranks.device.calls() as c:
            work = c.ffi.new("td_work **")
            if carried is not None:  # no other thread's call takes it
                ranks.carry(carried)
            getattr(c, name)(ranks.comm, *arguments, work)
            self._work = work

    def wait(self) -> Tensor:
        """The result. Kernels that are queued from here on see all of it."""
        work, self._work = self._work, None
        if work is not None:
            with self._device.calls() as c:
                c.td_work_queue_wait(work[0])
            self._arguments = None
        return self.result

    def __del__(self):
        with contextlib.suppress(RuntimeError):  # the communicator's error is reported by its next call
            self.wait()


class Ranks:
    """A communicator of libtandem among all ranks, on one device."""

    def __init__(self, device: Device):
        self.device = device
        rank, ranks, run, by_mpi = who(device.c)
        self.rank, self.ranks, self._told = rank, ranks, False
        self.models = itertools.count()  # a number for each DataParallel among these ranks
        self.limits = {name: device.limits.get(name, _seconds_of(name)) for name in LIMITS}
        _signals()
        _statuses()
        ffi = device.c.ffi
        self._hears = ffi.callback("bool(void *, double, const char *)", self._hear, onerror=self._stop)
        usual = "nccl" if device.kind == "cuda" else "mpi" if by_mpi else "gloo"
        backend = os.environ.get("TANDEM_BACKEND") or usual
        with device.calls() as c:
            limits = {name: limit for name, limit in self.limits.items() if limit is not None}
            fields = dict(backend=backend, rank=rank, ranks=ranks, run=run, token=_token(rank, run))
            fields |= dict(nccl_host=os.environ.get("NCCL_HOSTID"), waiting=self._hears)
            for name in ("directory", "address"):
                fields[name] = os.environ.get(f"TANDEM_{name.upper()}") or None
            options = c.struct("td_comm_options", **fields, **limits)
            self.comm = c.value("td_comm_open", c.device, options)

    def _hear(self, _, seconds: float, what) -> bool:
        """C's call waits. On the main thread Python runs the handlers of signals here; their exceptions go to _stop. On
        other threads, as autograd's of a GPU, Python runs no handlers: there an interrupt ends the wait."""
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
        calls = []
        with self.device.calls():  # no other thread sends in between
            for tensor, root in tensors:
                data = tensor.detach()
                flat = data if data.is_contiguous() and NAMES.get(data.dtype) in SENT else as_words(data)
                call = Call(self, "td_comm_broadcast", flat, flat, flat.numel(), NAMES[flat.dtype], root)
                calls.append((data, call))
                if len(calls) >= MOST_CALLS:
                    calls[-MOST_CALLS][1].wait()
        for data, call in calls:
            flat = call.wait()
            if flat.data_ptr() != data.data_ptr():
                data.copy_(_from_words(flat, data))

    def all_reduce(self, tensor: Tensor, how: str) -> Tensor:
        """The tensor, which becomes the sum, the average or the maximum of all ranks'."""
        count, kind = tensor.numel(), NAMES[tensor.dtype]
        return Call(self, "td_comm_all_reduce", tensor, tensor, tensor, count, kind, how).wait()

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

    def state(self, **parts: Any) -> Any:
        """A hash of each of these, of td_comm_part, which ranks compare with the call that carries it."""
        c = self.device.c
        found = c.ffi.new("uint64_t[]", c.TD_COMM_PARTS)
        for name, part in parts.items():
            number = int.from_bytes(digest(repr(part).encode()), "little")
            found[getattr(c, f"TD_COMM_{name.upper()}")] = number
        return found

    def carry(self, state: Any) -> None:
        self.device.c.library.lib.td_comm_carry(self.comm, state)  # each weight's collective calls this

    def collect(self, mine: bytes, to: int) -> list[bytes]:
        """On rank `to` each rank's bytes, in the order of the ranks; elsewhere an empty list. All ranks together."""
        parts = []
        for rank, size in enumerate(self.exchange(len(mine).to_bytes(8, "little"))):
            part = torch.empty(int.from_bytes(size, "little"), dtype=torch.uint8)
            if rank == self.rank:
                part = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            part = part.to(self.device.torch)
            self.broadcast([(part, rank)])
            parts += [part.cpu().numpy().tobytes()] if self.rank == to else []
        return parts

    def close(self) -> None:
        """At the end of the process, which fails if this fails. A failed program only tells the other ranks."""
        failed = self.device.failed or sys.exc_info()[0] is not None or _has_died() or any(_statuses())
        try:
            with self.device.calls() as c:
                if failed:
                    c.td_comm_abort(self.comm, "its program failed")
                c.td_comm_close(self.comm)
        except BaseException as error:
            if failed:
                return
            print(f"tandem: rank {self.rank} of {self.ranks} ends: {error}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # what Finalize's functions raise does not count


@functools.cache
def _signals() -> int | None:
    """A pipe with the numbers of signals as they come; None if the program, as an event loop, has one of its own."""
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


@functools.cache
def _statuses() -> list:
    """What the program has given to sys.exit() so far. Python does not tell at the end of a process."""
    exits, statuses = sys.exit, []

    def note(status: Any = None) -> None:
        statuses.append(status)
        exits(status)

    sys.exit = note
    return statuses


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


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


def sampled(tensor: Tensor | None) -> bytes:
    """A digest of a tensor's begin and end; of 0 where all of that is 0."""
    if tensor is None:
        return bytes(8)
    flat = (tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()).flatten()
    content = torch.cat([flat[:1024], flat[-1024:]]).contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return digest(content) if any(content) else bytes(8)


def identity(state: Any) -> bytes:
    """A digest of a saved state: of the begin and the end of each of its tensors."""
    return digest(b"".join(sampled(x) for x in tree_leaves(state) if isinstance(x, Tensor)))


def as_words(data: Tensor) -> Tensor:
    """As whole numbers of 8 bytes; a copy, unless its bytes are such numbers."""
    raw = data.contiguous().view(-1).view(torch.uint8)
    if raw.numel() % 8 == 0 and raw.storage_offset() % 8 == 0:
        return raw.view(torch.int64)
    words = torch.zeros(-(-raw.numel() // 8), dtype=torch.int64, device=data.device)
    words.view(torch.uint8)[: raw.numel()] = raw
    return words


def _from_words(words: Tensor, like: Tensor) -> Tensor:
    raw = words.view(torch.uint8)[: like.numel() * like.element_size()]
    return raw.view(like.dtype).view(like.shape)


def _launch(c: Session) -> Any:
    """Which rank a launcher made this process: a td_launch."""
    found = []

    @c.ffi.callback("td_launch_lookup")
    def get(name):
        text = os.environ.get(_text(c, name))
        found.append(c.ffi.NULL if text is None else c.ffi.new("char[]", os.fsencode(text)))
        return found[-1]

    return c.value("td_launch_read", get)


def who(c: Session) -> tuple[int, int, str, bool]:
    """This rank, how many there are, a name for this run that no other has, and whether mpirun started it."""
    if dist.is_available() and dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        names = [f"bridge-{os.getpid()}-{os.urandom(16).hex()}"]
        dist.broadcast_object_list(names, src=0)
        by_mpi = False
        with contextlib.suppress(TandemError):
            launch = _launch(c)
            by_mpi = (_text(c, launch.launcher), launch.rank, launch.ranks) == ("mpirun", rank, ranks)
        return rank, ranks, names[0], by_mpi
    launch = _launch(c)
    launcher = _text(c, launch.launcher)
    if launcher == "none":
        words = "call torch.distributed.init_process_group first, or start with torchrun or mpirun"
        raise RuntimeError(f"no ranks: {words}")
    return launch.rank, launch.ranks, _text(c, launch.run), launcher == "mpirun"


def _text(c: Session, string: Any) -> str:
    return c.ffi.string(string).decode()


def _token(rank: int, run: str) -> str | None:
    """What keeps strangers out of a run with an address: random if torch.distributed spread the run's name, else from
    TANDEM_TOKEN or the file TANDEM_TOKEN_FILE. Rank 0 warns if there is none."""
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
        words = "any program that reaches the port can join or end this run; set TANDEM_TOKEN or TANDEM_TOKEN_FILE"
        print(f"tandem: {address} is not protected: {words}", file=sys.stderr)
    return token


@functools.cache
def ranks_of(device: Device) -> Ranks:
    """The communicator of a device; it ends with the process, together with the other ranks'."""
    ranks = Ranks(device)
    Finalize(None, ranks.close, exitpriority=1)  # after all that use it
    return ranks


def ranks_within(device: Device, **limits: float | None) -> Ranks:
    """The same with limits; ValueError if the communicator was opened with others."""
    named = {name: limit for name, limit in limits.items() if limit is not None}
    device.limits |= named
    ranks = ranks_of(device)
    for name, limit in named.items():
        if limit != ranks.limits[name]:
            raise ValueError(
                f"{name} is {limit}: the ranks have met with {ranks.limits[name] or 'the default'}"
            )
    return ranks
