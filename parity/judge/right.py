"""`python -m parity judge FOLDER`: somebody's functions in C's place, in their own interpreter.

Each case is a case of parity, with the same draws, rule and truths. examinee.py makes the calls there; PyTorch's side
and the truth are computed here. Cases of the level "course" are what an edition of the course promises. They decide.
Cases of the level "beyond" are reported.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from parity.core import Case, within
from parity.core.allowance import relative
from parity.core.case import ParityError
from parity.core.device import open_device
from parity.core.measure import measure_case
from parity.judge import examinee, numbers
from parity.judge import times as clocked
from parity.shared.attend import by_autograd
from ref import transformer
from ref.attention import attention, logsumexp, masked_scores
from ref.ops import at_least_f32, tf32_matmul
from tandem.library import Library

ATTENTION = ("get_flashattention_autograd_function_pytorch", "get_flashattention_autograd_function_triton")
RANKED = ("get_ddp", "get_ddp_individual_parameters", "get_ddp_bucketed", "get_sharded_optimizer", "get_fsdp")
# batch, seq, head_dim. Ascending: the first that fails is shown.
# Few numbers, so that many orders of summation say what is allowed.
SIZES = (1, 16, 16), (2, 16, 16), (2, 32, 32), (1, 32, 64), (1, 32, 128), (5, 512, 16), (1, 128, 64)
SIZES = [dict(zip(("batch", "seq", "head_dim"), size, strict=True)) for size in SIZES]
ATTEND = dict(batch=2, seq=32, seq_k=0, head_dim=32, causal=False, strided=False, dtype="f32", std=1)
ATTEND |= dict(apart=0.0, twice=False, call="attention")
LONG = dict(batch=1, seq=256)  # several tiles of keys
# The standard deviation of scores that overflow an exp() without the maximum; exp() multiplies their errors.
LARGE, FAR_WITHIN = 40, {"f32": 1e-4, "tf32": 0.01}
SMALL = 2.0**-24  # of the output's gradient, as of a mean loss: 16 bits with 5 for the exponent lose it
APART = 4.5  # added to q and subtracted from k: exp() of each score is 0 without the maximum
CAUSAL = {"causal": True}
ATTENDING = {
    ("course", "without a mask"): SIZES,
    ("course", "causal"): [keys | CAUSAL for keys in SIZES],
    ("course", "large scores"): [{"std": LARGE} | LONG, {"std": LARGE} | LONG | CAUSAL],
    ("course", "scores far below 0"): [{"apart": APART}, {"apart": APART} | CAUSAL],
    ("course", "memory"): [{"call": "memory", "batch": 1, "seq": 512, "head_dim": 16}],
    ("beyond", "a length that 16 does not divide"): [{"seq": 37}, {"seq": 37} | CAUSAL],
    ("beyond", "q and k of other lengths"): [{"seq_k": 64}, {"seq": 64, "seq_k": 32}],
    ("beyond", "a head size of 80"): [{"head_dim": 80}],
    ("beyond", "tensors that are not contiguous"): [{"strided": True}],
    ("beyond", "two backward passes of a graph"): [{"twice": True}],
    ("beyond", "bf16"): [{"dtype": "bf16"}, {"dtype": "bf16", "seq": 1024, "head_dim": 16} | CAUSAL],
}
TRAIN = dict(ranks=2, steps=5, optimizer="sgd", micro=1, unused=False, compute=None, bucket_mb=0.001)
TRAIN |= dict(width=16, timed=False, groups=False, schedule=False, tied=False, closure=False)
TIMED = dict(steps=25, width=512, bucket_mb=1.0, timed=True)
SCHEDULE = dict(schedule=True, groups=True, closure=True, optimizer="adamw")
WHOLE = dict(unused=True, optimizer="adamw", bucket_mb=1.0)  # one bucket
TRAINING = {
    ("course", "sgd"): ("", {}),
    ("course", "adamw"): ("", {"optimizer": "adamw", "bucket_mb": 0.01}),
    ("course", "parameter groups"): ("get_sharded", {"groups": True}),
    ("course", "compute in f16"): ("get_fsdp", {"compute": "float16"}),
    ("beyond", "one bucket"): ("get_ddp_bucketed", {"bucket_mb": None}),
    ("beyond", "communication"): ("get_ddp", {}),
    ("beyond", "three ranks"): ("", {"ranks": 3, "bucket_mb": 0.0001}),
    ("beyond", "a learning rate that changes"): ("get_sharded", SCHEDULE),
    ("beyond", "gradients that ranks average"): ("get_sharded", {"one_batch": False}),
    ("beyond", "parameters without gradient"): ("get_(ddp|sharded)", WHOLE),
    ("beyond", "tied and frozen weights"): ("get_fsdp", {"tied": True}),
    ("beyond", "two backward passes"): ("get_ddp|get_fsdp", {"micro": 2}),
    ("times", "a step, sgd"): ("get_ddp", TIMED),
    ("times", "a step, adamw"): ("get_sharded", TIMED | {"optimizer": "adamw"}),
}
SHOWN = "batch seq seq_k head_dim causal dtype ranks optimizer micro compute seed".split()
BAD, QUIET = ("wrong", "fails"), ("right", "as TF32", "not there")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
REST_S = 10.0  # for the other ranks to answer, once one has failed
IDLE = 0.01  # of the time that is waited: a rank that used less of a processor does nothing
# How far from the truth TF32 may be: so many times PyTorch's formula with products in TF32. Triton's read
# f32 without its last bits, others round them; the products of one pass may be in f32.
AS_TF32 = 1.5
FIRST, FIRST_ROUNDINGS = "dq of the first query", 32
EXPECTED = {"inputs": "unchanged", "saved": "one logsumexp", "is_causal": "used", "kernel": "own"}
EXPECTED |= {"memory": "grows with the length", "after the wrap": "rank 0's weights", "ranks": "equal bits"}
EXPECTED |= {"first call": "like a later one", "weights of a rank": "its part", "state of a rank": "its part"}
EXPECTED |= {"all-reduces": examinee.PROMISED, "after a step": "no more memory"}
EXPECTED |= {"a closure's loss": "returned", "computed in": "float16"}
EXPECTED |= {"timed calls": "like PyTorch's", "after a call": "outputs stay"}
# (the function and what the finding says, what may have caused it)
HINTS = (
    (r"after a call", "does a call keep a tensor on the class, or return a buffer that the next one writes?"),
    (r"^\w+: dk: .*all are about", "dK needs the factor 1 / sqrt(d), as dQ does."),
    (r"^\w+: dq: ", "dS is P (dP - D), with D the row sums of O dO, and with the mask of forward."),
    (r"after the wrap", "the wrapper must broadcast the parameters of rank 0."),
    (r"ranks: ", "is every handle waited for, and every parameter reduced, norms and the last bucket too?"),
    (r"^sharded\w+: p\.", "does each parameter have an owner, which sends it to all after the step?"),
    (r"^\w+: p\.", "is the sum of the ranks divided by their number, once?"),
)


def cases(seed: int, device: torch.device):
    for adapter in ATTENTION:
        for (level, what), every in ATTENDING.items():
            for keys in every:
                yield Case(adapter, level=level, what=what, seed=seed, **ATTEND | keys)
        yield from clocked.cases(adapter, device, seed)
    for adapter in RANKED:
        case = functools.partial(Case, adapter, call="train", seed=seed)
        for (level, what), (adapters, keys) in TRAINING.items():
            if re.match(adapters, adapter):
                keys = TRAIN | {"one_batch": adapter == "get_sharded_optimizer"} | keys
                yield case(level=level, what=what, **keys)


def truncated(x: torch.Tensor) -> torch.Tensor:
    """f32 as Triton's products in TF32 read it: without the last 13 bits of its fraction."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def far(case: Case) -> bool:
    """Whether exp() multiplies the scores' errors. Then inputs have TF32's numbers, whose scores TF32 leaves exact."""
    return bool(case.get("std") == LARGE or case.get("apart"))


PRODUCTS = {
    "f32": torch.matmul,
    "tf32": tf32_matmul,
    "down": lambda a, b: truncated(a) @ truncated(b),
    "wide": lambda a, b: (a.double() @ b.double()).float(),  # f32 also where matmul uses TF32
}


def by_saved_sums(
    case: Case, x: Mapping[str, torch.Tensor], forward: str = "f32", backward: str = "f32"
) -> dict[str, torch.Tensor]:
    """FlashAttention's way to the answer: D is the sum of dO O. The arguments say how products are formed."""
    scale, k, dtype = x["q"].shape[-1] ** -0.5, x["k"], x["q"].dtype

    def scores(product):
        return masked_scores(at_least_f32(x["q"]), at_least_f32(k), case.causal, matmul=product)

    product = PRODUCTS[forward]
    lse = scores(product).logsumexp(-1)
    o = product((scores(product) - lse[..., None]).exp().to(dtype), x["v"])
    product = PRODUCTS[backward]
    p = (scores(product) - lse[..., None]).exp()
    sums = at_least_f32(x["do"] * o).sum(-1, keepdim=True)
    ds = (p * (at_least_f32(product(x["do"], x["v"].mT)) - sums) * scale).to(dtype)
    found = {"o": o, "dq": product(ds, k), "dk": product(ds.mT, x["q"])}
    return found | {"dv": product(p.to(dtype).mT, x["do"]), "lse": lse}


def as_tf32(case: Case, x: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> dict:
    """A rule for each result."""
    found = [by_saved_sums(case, x, *way) for way in itertools.product(("tf32", "down", "wide"), repeat=2)]
    far_off = {name: max(relative(way[name] - truth[name], truth[name]) for way in found) for name in truth}
    return {name: within(rel_l2=AS_TF32 * off) for name, off in far_off.items()}


def fused(case: Case, x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PyTorch's own fused attention, which may be less exact than its formula."""
    return by_autograd(functools.partial(examinee.fused, causal=case.causal), *x.values())


def apart(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """In a causal row of one key dq is 0 but for rounding, which 0 in PyTorch's answer does not measure."""
    if not case.get("causal") or case.call != "attention":
        return found
    dq = found["dq"].clone()
    dq[:, 0] = 0
    return found | {"dq": dq, FIRST: found["dq"][:, 0]}


class Processes(contextlib.AbstractContextManager):
    """So many ranks of their interpreter, in their folder. Nothing is written there."""

    def __init__(self, folder: Path, python: Sequence[str], seconds: float, ranks: int, device: str):
        self.seconds, self.work = seconds, tempfile.TemporaryDirectory(prefix="tandem-judge-", dir="/dev/shm")
        caches = dict.fromkeys(CACHES, f"{self.work.name}/cache")
        how = dict(cwd=folder, env=os.environ | caches | {"PYTHONDONTWRITEBYTECODE": "1"}, text=True)
        how |= dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        command = [*python, "-c", Path(examinee.__file__).read_text(), self.work.name]
        try:
            self.ranks = [
                subprocess.Popen([*command, str(rank), str(ranks), device], start_new_session=True, **how)
                for rank in range(ranks)
            ]
        except OSError as error:
            raise ParityError(f"--python is {' '.join(python)}: {error.strerror}") from error

    def ask(self, request: Mapping, tensors: Mapping[str, torch.Tensor]) -> list[tuple[dict, dict]]:
        """(tensors, facts) of each rank."""
        files = {name: examinee.store(f"{self.work.name}/{name}", tensor) for name, tensor in tensors.items()}
        replies: dict[int, dict] = {}
        for process in self.ranks:
            with contextlib.suppress(OSError):  # it has died, as is seen below
                process.stdin.write(json.dumps(request | {"tensors": files}) + "\n")
                process.stdin.flush()
        left, limit = dict(enumerate(self.ranks)), self.seconds
        most = {rank: busy_s(process.pid) + limit for rank, process in left.items()}
        while left:
            least = {rank: busy_s(process.pid) + IDLE * limit for rank, process in left.items()}
            ready = wait([process.stdout for process in left.values()], limit)
            if not ready and not any(least[r] < busy_s(p.pid) < most[r] for r, p in left.items()):
                break
            for rank in [rank for rank, process in left.items() if process.stdout in ready]:
                line = left.pop(rank).stdout.readline()
                replies[rank] = json.loads(line) if line else {"error": "the process died"}
                limit = limit if "facts" in replies[rank] else REST_S
        found = []
        for rank, reply in sorted(replies.items()):
            if "absent" in reply:
                raise NotImplementedError(reply["absent"])
            if "error" in reply:
                raise RuntimeError(f"rank {rank}: " * (len(self.ranks) > 1) + reply["error"])
            read = {name: examinee.load(*how) for name, how in reply["tensors"].items()}
            found.append((read, reply["facts"]))
        for rank in left:
            raise RuntimeError(f"rank {rank} of {len(self.ranks)} did not answer in {self.seconds:g} s")
        return found

    def __exit__(self, *_) -> None:
        for process in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.work.cleanup()


def busy_s(session: int) -> float:
    """The processor time of a session's processes: a slow or busy machine gives them little of it."""
    total = 0.0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == session)
    return total / os.sysconf("SC_CLK_TCK")


class Theirs:
    """A module of cases, as parity.core runs it, whose C is somebody's folder."""

    __name__ = "parity.judge"

    def __init__(self, *how: Any, device: str):
        self.start = functools.partial(Processes, *how, device=device)
        self.processes: dict[int, Processes] = {}
        self.timed: dict = {}  # of the last timed case
        self.first: dict[str, str] = {}  # what the first call of a shape was like

    def ask(self, ranks: int, request: Mapping, tensors: Mapping) -> list[tuple[dict, dict]]:
        if ranks not in self.processes:
            self.processes[ranks] = self.start(ranks=ranks)
        try:
            return self.processes[ranks].ask(request, tensors)
        except RuntimeError:  # a rank may wait for others for ever
            self.close(ranks)
            raise

    def run(self, case: Case, draw, c) -> dict[str, Any]:
        request, facts = case.keys | {"adapter": case.deliverable}, {}
        tensors, formula = getattr(self, case.call)(case, request, draw)

        ask = functools.partial(self.ask, case.get("ranks", 1), request, tensors)
        if case.level == "times":  # they are taken once: both calls of C's side have one answer
            ask = functools.cache(ask)

        def theirs():
            (found, said), *others = ask()
            self.timed = said.get("timed")
            said = {name: words for name, words in said.items() if name != "timed"}
            if "first call" in said:  # of the shape: C is called twice, and Triton's function in f32 and TF32
                shape = str({name: request[name] for name in sorted(request) if name != "dtype"})
                said["first call"] = self.first.setdefault(shape, said["first call"])
            facts.update(said | ({"ranks": EXPECTED["ranks"]} if others else {}))
            for rank, (other, its) in reversed([*enumerate(others, 1)]):  # the first rank has the last word
                differ = [name[2:] for name in found if not torch.equal(found[name], other[name])]
                facts.update({"ranks": f"rank {rank} has another {differ[0]}"} if differ else {})
                facts.update({name: its[name] for name in said if its[name] != EXPECTED[name]})
            device = draw.device if case.call != "train" else "cpu"
            found = {name: value.to(device, copy=True) for name, value in found.items()}
            if off:
                wide = all(relative(found[n] - whole[n], whole[n]) < off[n] / 10 for n in off if n in found)
                facts["computed in"] = "float32" if wide else EXPECTED["computed in"]
            if case.call == "attention" and "lse" not in found:
                found["lse"] = torch.full(tensors["q"].shape[:2], torch.nan)
            return facts | apart(case, found)

        def plain(x):
            return apart(case, formula(x))

        exact = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
        eager = "torch_tf32" if case.get("dtype") == "tf32" else "torch_eager"
        sides = {"c": theirs, eager: lambda: plain(tensors) | {name: EXPECTED[name] for name in facts}}
        rules, equal, off = {}, formula, {}
        if case.call == "attention":
            if eager == "torch_eager":
                sides["torch_fused"] = lambda: sides[eager]() | apart(case, fused(case, tensors))
            equal = functools.partial(by_saved_sums, case)
            u = 2.0**-10 if case.dtype == "tf32" else torch.finfo(tensors["q"].dtype).eps
            rules = {FIRST: within(max_abs=FIRST_ROUNDINGS * u)}
            rules |= {"lse": within(rel_l2=1e-4)} if case.dtype == "bf16" else {}
            if far(case):
                rules |= {"*": within(rel_l2=FAR_WITHIN[case.dtype])}
            elif case.dtype == "tf32":
                rules |= as_tf32(case, tensors, formula(exact))
        elif case.level == "times":
            rules = {"*": within(rel_l2=clocked.near(case))}
        elif case.get("compute"):
            # As far as one process that computes in f16 is from f32, which depends on the weights.
            whole = examinee.alone(request, exact, transformer)
            narrow = examinee.alone(request, tensors, None, getattr(torch, case.compute))
            off |= {name: relative(narrow[name] - whole[name], whole[name]) for name in whole}
            rules = {name: within(rel_l2=max(2e-4, 3 * far_off)) for name, far_off in off.items()}
        sides |= {"truth": lambda: plain(exact), "reference": eager, "rule": rules}
        return sides | {"equal": lambda: apart(case, equal(tensors))}

    def memory(self, *_):
        return {}, lambda x: {}

    def attention(self, case, request, draw):
        shapes = {"q": case.seq, "k": case.seq_k or case.seq, "v": case.seq_k or case.seq, "do": case.seq}
        sizes = {name: (case.batch, seq, case.head_dim) for name, seq in shapes.items()}
        away = case.get("apart", 0.0)
        how = {"q": dict(std=case.get("std", 1), mean=away), "k": dict(mean=-away)}
        how |= {} if case.causal else {"do": dict(std=SMALL)}
        x = {n: draw.normal(n, size, case.dtype, **how.get(n, {})) for n, size in sizes.items()}
        if case.strided:  # of one gradient for the batch
            x["do"] = x["do"][:1].expand_as(x["do"])
        if far(case):
            x = {name: truncated(value) for name, value in x.items()}

        def formula(x):
            if (case.dtype, x["q"].dtype) == ("tf32", torch.float32):
                return by_saved_sums(case, x, "tf32", "tf32")
            wide = at_least_f32(x["q"]), at_least_f32(x["k"])
            attend = functools.partial(attention, causal=case.causal)
            return by_autograd(attend, *x.values()) | {"lse": logsumexp(*wide, case.causal)}

        return x, formula

    def times(self, case, request, draw):
        x, formula = self.attention(case, request, draw)
        request |= clocked.request_of(case, x, draw)

        def judged(x):
            turned = {name: value.flatten().roll(request["turn"]).view_as(value) for name, value in x.items()}
            names = ("o", "dq", "dk", "dv")[: 1 if case["pass"] == "forward" else 4]
            return {name: value for name, value in formula(turned).items() if name in names}

        return x, judged

    def train(self, case, request, draw):
        full = case.deliverable == "get_fsdp"
        model = examinee.model_of(request, {}, transformer)
        std = 0.3 * (TRAIN["width"] / case.width) ** 0.5
        x = {f"w.{n}": draw.normal(f"w.{n}", p.shape, "f32", std=std) for n, p in model.named_parameters()}
        rows = (case.micro, case.steps, case.ranks, 4)
        x["x"] = draw.integers("x", (*rows, 6), high=48) if full else draw.normal("x", (*rows, 10), "f32")
        x["y"] = draw.normal("y", (*rows, 6, 33) if full else (*rows, 5), "f32")
        # Ranks use the CPU, also if attention runs on a GPU.
        x = {name: value.cpu() for name, value in x.items()}
        return x, lambda x: examinee.alone(request, x, transformer)

    def close(self, *ranks: int) -> None:
        for count in ranks or [*self.processes]:
            self.processes.pop(count).__exit__()


def kind_of(case: Case) -> tuple[str, str, str]:
    return case.deliverable, case.level, case.what


def judge(options, console, bounds: numbers.Bounds) -> tuple[list[dict], str, list[numbers.Row]]:
    """Prints a line for each kind of case of each function. Returns records, their interpreter, and times."""
    library, device = Library(options.library), open_device(options.device)
    rows = clocked.Rows(library, device, bounds)
    how = options.folder.resolve(), options.python.split(), options.seconds
    theirs, found = Theirs(*how, device=device.torch.type), []
    measure = functools.partial(measure_case, theirs, library=library, budget=0.0, device=device)
    with contextlib.closing(theirs):
        try:
            [(_, names)] = theirs.ask(1, {"call": "names"}, {})
        except RuntimeError as error:
            raise ParityError(str(error)) from error
        console.print(f"seed {options.seed}, {names['']}")
        for kind, group in itertools.groupby(cases(options.seed, device.torch), kind_of):
            if kind[0] not in names or not re.search(options.only, ", ".join(kind)):
                continue
            theirs.timed = None
            verdict, record = judged(measure, group)
            if theirs.timed:
                rows.add(kind[0], record["case"], theirs.timed, record["message"] if verdict in BAD else "")
            if verdict == "not there":
                del names[kind[0]]
            console.print(f"{verdict:10} {', '.join(kind if verdict != 'not there' else kind[:1])}")
            for line in () if verdict in QUIET else words_of(record, options.hints):
                console.print(f"    {line}")
            found.append(record | {"verdict": verdict})
    return found, names[""], rows.rows


def judged(measure: Callable, group: Iterable[Case]) -> tuple[str, dict]:
    """The verdict on cases of one kind, and the record of the first that is wrong, or of the last."""
    verdict, record = "right", {}
    for case in group:
        record, triton = measure(case)[0], "triton" in case.deliverable
        if triton and case.get("dtype") == "f32" and record["status"] == "failed":
            record = measure(Case(case.deliverable, **case.keys | {"dtype": "tf32"}))[0]
            verdict = "as TF32"
        status, words = record["status"], record.get("message", "")
        if status == "unsupported" or (status == "error" and triton and not torch.cuda.is_available()):
            return "not there", record
        if "is_causal: is 'ignored'" in words and not triton:  # the course's first question allows it
            return "ignored", record
        if not held(record):
            return "wrong" if status == "failed" else "fails", record
    return verdict, record


def held(record: Mapping) -> bool:
    """A case that was not judged, because PyTorch's side failed, does not hold."""
    return record["status"] == "ok" and not record.get("message")


def words_of(record: Mapping, hints: bool) -> list[str]:
    """The smallest input that shows it, what was found, and the likely mistake."""
    case, words = record["case"], record["message"]
    said = f"{record['deliverable'].removeprefix('get_')}: {words}"
    may = [f"likely: {hint}" for pattern, hint in HINTS if hints and re.search(pattern, said)]
    return [" ".join(f"{key} {case[key]}" for key in SHOWN if case.get(key)), words, *may[:1]]
