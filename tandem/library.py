"""libtandem through cffi: tensors are passed without a copy. The build writes the prototypes beside the library.

torch must be imported before the library is loaded. Both need libgomp.so.1, and the loader gives the library the copy
of torch: one OpenMP runtime and one pool of threads for both sides (tried with torch 2.6, 2.11, 2.13, also after
scikit-learn, which brings a runtime of its own).
"""

import contextlib
import math
import os
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cffi
import torch

from . import builds

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"tandem needs torch 2.6 or newer, this is {torch.__version__}")

ROOT = Path(__file__).resolve().parents[1]
PRESET = "default"

# How a dtype is stored. TF32 multiplies f32; bf16_mixed has f32 weights and bf16 activations.
DTYPES = {
    "tf32": torch.float32,
    "bf16_mixed": torch.float32,
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The tensors that a typed pointer takes; void * takes any tensor.
POINTEES = {"float": torch.float32, "double": torch.float64, "uint8_t": torch.uint8}
POINTEES |= {"int64_t": torch.int64, "int32_t": torch.int32, "int": torch.int32}

# dtypes of cases that are no td_dtype, as fields of C's structs.
WAYS = {"tf32": {"dtype": "f32", "tf32": True}, "bf16_mixed": {"dtype": "bf16"}}


class TandemError(RuntimeError):
    """A call returned something other than TD_OK."""

    def __init__(self, function: str, status: str, message: str):
        super().__init__(f"{function}: {status}: {message}")
        self.function, self.status, self.message = function, status, message


class Cpu:
    """The device that a Session asks for its `torch`, `kind`, `name` and stream()."""

    kind = name = "cpu"
    torch = torch.device("cpu")

    def stream(self) -> int | None:
        """PyTorch's current stream, for C to queue on."""
        return None


def default_library() -> Path:
    """The library that TANDEM_LIBRARY names, else of the installed package, else of a clone's build."""
    named = os.environ.get("TANDEM_LIBRARY")
    if named:
        return Path(named)
    folder = builds.folder()
    return folder / "lib/libtandem.so" if folder else ROOT / "build" / PRESET / "impl" / "libtandem.so"


def openmp_runtimes() -> list[str]:
    """The OpenMP runtimes of this process; more than one means two pools of threads."""
    names = ("libgomp", "libiomp", "libomp")
    files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return sorted(file for file in files if Path(file).name.startswith(names))


class Library:
    """The loaded library: one a process."""

    def __init__(self, path: Path | None = None):
        self.path = Path(path) if path else default_library()
        # libtandem.so and libtandem.so.0 have libtandem.cdef, which cmake/build.cmake writes.
        prototypes = self.path.with_name(self.path.name.partition(".so")[0] + ".cdef")
        build = f"cmake --preset {PRESET} && cmake --build --preset {PRESET}"
        if builds.BUILDS in self.path.parents:
            build = "pip install --force-reinstall"
        for file, kind in ((self.path, "library"), (prototypes, "prototypes of the library")):
            if not file.is_file():
                how = f"build it with {build}, or name one by --library or TANDEM_LIBRARY"
                raise FileNotFoundError(f"no {kind} at {file}: {how}")
        text = prototypes.read_text()
        self.ffi = cffi.FFI()
        self.ffi.cdef(text)
        self.lib = self.ffi.dlopen(str(self.path))
        try:
            interface = self.ffi.string(self.lib.td_build_interface()).decode()
        except AttributeError:
            interface = "unknown"
        if f"interface {interface} " not in text[:40]:  # a call would crash if structs differ
            other = f"another library than {self.path} (interface {interface})"
            raise RuntimeError(f"{prototypes} is of {other}: build both again with {build}")
        self._share_threads()

    def _share_threads(self) -> None:
        """C has PyTorch's number of threads. If both use one OpenMP runtime, that is so by itself. Other packages, such
        as scikit-learn, may bring further runtimes: neither side uses them."""
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        one = self.lib.td_cpu_threads() == threads + 1
        torch.set_num_threads(threads)
        if not one:
            _check(self, "td_cpu_set_threads", self.lib.td_cpu_set_threads(threads))
            warnings.warn(
                f"libtandem and PyTorch use two OpenMP runtimes ({', '.join(openmp_runtimes())}): each has its own "
                f"{threads} threads, and torch.set_num_threads() does not set C's",
                stacklevel=3,
            )

    def set_threads(self, threads: int) -> None:
        """The same number of threads for PyTorch and for C."""
        torch.set_num_threads(threads)
        _check(self, "td_cpu_set_threads", self.lib.td_cpu_set_threads(threads))
        seen = (torch.get_num_threads(), self.lib.td_cpu_threads())
        if seen != (threads, threads):
            raise RuntimeError(f"asked for {threads} threads; PyTorch has {seen[0]}, C has {seen[1]}")

    def open(self, on: Any = None) -> "Session":
        return Session(self, on or Cpu())


class Session(contextlib.AbstractContextManager):
    """What run() gets as `c`: the library with one open device, for one case. A context manager."""

    def __init__(self, library: Library, on: Any):
        self.library = library
        self.on = on
        self.ranks = None  # of a case of several: rank.Ranks
        self.ffi = library.ffi
        self._later: list[tuple[str, Any]] = []
        self._strings: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._blocks: dict[int, int] = {}  # address: bytes of what work() gave
        self._sides: dict[str, Session] = {}
        self.device = self.value("td_device_open", on.name)
        self._stream = None
        native = on.stream()
        if native is not None:
            self._stream = self.value("td_stream_wrap", self.device, self.ffi.cast("void *", native))
            self.td_device_set_stream(self.device, self._stream)

    def own_stream(self, own: bool) -> None:
        """C queues on its device's own stream, or on PyTorch's again. It waits for the device first."""
        if self._stream is not None:
            self.on.synchronize()
            self.td_device_set_stream(self.device, None if own else self._stream)

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Destroys what create() made, last first, and the device with every block on it."""
        for session in self._sides.values():
            session.close()
        self._sides.clear()
        while self._later:
            name, handle = self._later.pop()
            getattr(self, name)(handle)
        if self.device is not None:
            if self._stream is not None:
                self.td_device_set_stream(self.device, None)
                self.td_stream_destroy(self._stream)
            self.td_device_close(self.device)
            self.device = None

    def __getattr__(self, name: str):
        if not name.lower().startswith("td_"):
            raise AttributeError(f"{name!r} is neither a helper nor a function of libtandem")
        try:
            function = getattr(self.library.lib, name)
        except AttributeError as error:
            raise AttributeError(f"libtandem has no {name}: {error}") from error
        kind = self.ffi.typeof(function) if callable(function) else None
        if kind is None or kind.kind != "function":
            return function  # a constant of an enum, or an object such as td_attention_flash

        def call(*arguments):
            result = function(*self._given(name, kind, arguments))
            if kind.result.cname == "td_status":
                return _check(self.library, name, result)
            return result

        call.__name__ = name
        self.__dict__[name] = call  # the next use skips all of the above
        return call

    def bound(self, name: str, *arguments):
        """A call whose arguments are converted once, to time short calls. Tensors among them must outlive it."""
        function = getattr(self.library.lib, name)
        given = self._given(name, self.ffi.typeof(function), arguments)

        def call():
            status = function(*given)
            if status:
                _check(self.library, name, status)

        return call

    def side(self, impl: str) -> "Session":
        """The session of the C variant `impl`: this one for "c", else one with its own device."""
        if impl == "c":
            return self
        if impl not in self._sides:
            self._sides[impl] = Session(self.library, self.on)
        return self._sides[impl]

    def enum(self, kind: str, name: str) -> int:
        """The constant of an enum whose last words are `name`: enum("td_dtype", "bf16") is TD_BF16."""
        if kind == "td_dtype":
            name = WAYS.get(name, {"dtype": name})["dtype"]
        elements = self.ffi.typeof(kind).relements
        found = [value for element, value in elements.items() if element.endswith(f"_{name.upper()}")]
        if len(found) != 1:
            there = ", ".join(sorted(elements, key=elements.get))
            raise ValueError(f"{name!r} names {len(found)} constants of {kind}: {there}")
        return found[0]

    def struct(self, kind: str, case: Mapping | Any = None, /, **fields: Any):
        """A struct filled by name from keywords, then from the case, else with 0. "bf16" becomes TD_BF16. "tf32" and
        "bf16_mixed" set dtype, tf32 and precision. A nested struct gets the same case, or a dict of its keyword."""
        keys = dict(case) if isinstance(case, Mapping) else dict(getattr(case, "keys", ()))
        if "dtype" in keys:
            keys |= {"precision": keys["dtype"]} | WAYS.get(keys["dtype"], {})
        pointer = self.ffi.new(f"{kind} *")
        names = {name for name, _ in self.ffi.typeof(kind).fields}
        unknown = set(fields) - names
        if unknown:
            raise TypeError(
                f"{kind} has no field {', '.join(sorted(unknown))}, only: {', '.join(sorted(names))}"
            )
        self._strings[pointer] = []
        self._fill(pointer[0], self.ffi.typeof(kind), keys, fields, self._strings[pointer])
        return pointer

    def value(self, name: str, *arguments):
        """Calls a function whose last argument is an `out` pointer; returns the value that it gave."""
        kind = self.ffi.typeof(getattr(self.library.lib, name))
        out = self.ffi.new(kind.args[-1].cname)
        getattr(self, name)(*arguments, out)
        return out[0]

    def create(self, name: str, *arguments):
        """Calls a td_<noun>_create. The object's _destroy runs when the case is over."""
        if not name.endswith("_create"):
            raise ValueError(f"{name} is no _create")
        handle = self.value(name, *arguments)
        self._later.append((name.removesuffix("_create") + "_destroy", handle))
        return handle

    def destroy(self, handle) -> None:
        """Destroys an object of create() before the case is over."""
        name = next(name for name, made in self._later if made == handle)
        self._later.remove((name, handle))
        getattr(self, name)(handle)

    def work(self, nbytes: int):
        """Scratch on the device until the case is over; None for no bytes."""
        if nbytes == 0:
            return None
        block = self.value("td_device_alloc", self.device, nbytes)
        self._blocks[self._number(block)] = nbytes
        return block

    def free(self, block) -> None:
        """Frees a block of work() before the case is over; accepts None."""
        if block is not None:
            del self._blocks[self._number(block)]
            self.td_device_free(self.device, block)

    def tensor(self, address, shape, dtype: str) -> torch.Tensor:
        """A tensor over memory that C owns. It must not outlive the case, or it keeps an address of ffi.gc() alive."""
        kind = DTYPES[dtype]
        nbytes = math.prod(shape) * kind.itemsize
        if nbytes == 0:
            return torch.empty(tuple(shape), dtype=kind, device=self.on.torch)
        held = address if isinstance(address, self.ffi.CData) else self.ffi.cast("char *", address)
        if self.on.kind == "cpu":
            view = torch.frombuffer(self.ffi.buffer(held, nbytes), dtype=torch.uint8)
        else:
            memory = _Memory(self._number(address), nbytes, held)
            view = torch.as_tensor(memory, device=self.on.torch)
        return view.view(kind).view(tuple(shape))

    def bytes_peak(self) -> int:
        return self.value("td_device_memory", self.device).peak_bytes

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a block of work()."""
        address = tensor.data_ptr()
        return any(start <= address < start + nbytes for start, nbytes in self._blocks.items())

    def _number(self, pointer) -> int:
        return int(self.ffi.cast("uintptr_t", pointer))

    def _fill(self, target, kind, keys: Mapping, fields: Mapping, strings: list) -> None:
        for name, field in kind.fields:
            value = fields.get(name, keys.get(name))
            if field.type.kind == "struct":
                if isinstance(value, self.ffi.CData):
                    setattr(target, name, value)
                else:
                    inner = value if isinstance(value, Mapping) else {}
                    self._fill(getattr(target, name), field.type, keys, inner, strings)
            elif value is None:
                continue
            elif field.type.kind == "enum" and isinstance(value, str):
                setattr(target, name, self.enum(field.type.cname, value))
            elif field.type.kind == "pointer" and isinstance(value, str):
                strings.append(self.ffi.new("char[]", value.encode()))
                setattr(target, name, strings[-1])
            else:
                setattr(target, name, value)

    def _given(self, name: str, kind, arguments) -> list:
        if len(arguments) != len(kind.args):
            raise TypeError(f"{name} takes {len(kind.args)} arguments, got {len(arguments)}")
        pairs = enumerate(zip(kind.args, arguments, strict=True))
        return [self._pass(name, i, want, argument) for i, (want, argument) in pairs]

    def _pass(self, function: str, position: int, want, argument):
        """One argument as cffi takes it."""
        if argument is None:
            return self.ffi.NULL
        if isinstance(argument, torch.Tensor):
            return self._address(f"{function}, argument {position + 1}", want, argument)
        if isinstance(argument, str):
            return self.enum(want.cname, argument) if want.kind == "enum" else argument.encode()
        return argument

    def _address(self, where: str, want, tensor: torch.Tensor):
        if want.kind != "pointer":
            raise TypeError(f"{where}: a tensor, needs {want.cname}")
        if tensor.device != self.on.torch:
            raise ValueError(f"{where}: a tensor on {tensor.device}, C's device is {self.on.torch}")
        if not tensor.is_contiguous():
            raise ValueError(f"{where}: a tensor of strides {tensor.stride()}, needs a contiguous one")
        if want.item.kind != "void" and POINTEES.get(want.item.cname) != tensor.dtype:
            raise TypeError(f"{where}: a tensor of {tensor.dtype}, needs {want.cname}")
        return self.ffi.cast(want, tensor.data_ptr())


class _Memory:
    """Bytes on a GPU, for PyTorch, by the CUDA array interface."""

    def __init__(self, address: int, nbytes: int, held: Any):
        self.held = held
        place = {"data": (address, False), "shape": (nbytes,)}
        self.__cuda_array_interface__ = {"typestr": "|u1", "version": 3} | place


def _check(library: Library, function: str, status: int) -> None:
    if status != 0:
        name = library.ffi.string(library.lib.td_status_name(status)).decode()
        message = library.ffi.string(library.lib.td_last_error()).decode()
        raise TandemError(function, name, message)
