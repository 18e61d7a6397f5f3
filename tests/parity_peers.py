"""What other projects' suites try. Nothing of theirs is here.

PyTorch's tables of inputs, of every optimizer sharded and of attention, and attention of ragged lengths under
flash-attention's rule. PyTorch installs the tables (torch.testing._internal). They import `expecttest` for a class
that is not used here. With --suite FOLDER, a clone of one of these suites:

    stanford-cs336/assignment2-systems   its tests with tests/course_adapters.py: needs pytest, einops, einx, jaxtyping
    Dao-AILab/flash-attention            every pair of lengths and head size that its tests name, in bf16
    huggingface/safetensors              the files that its tests of the format hold
"""

import ast
import contextlib
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock
from pathlib import Path

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from tandem import FlashAttention, ShardedOptimizer
from tandem.library import Library, TandemError

sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

REFUSED = ("LBFGS", "SparseAdam")  # the first needs all parameters at once, the second sparse gradients


def trained(make, weights):
    """The weights after three steps."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    optimizer = make(parameters)
    for step in range(3):
        for parameter in parameters:
            parameter.grad = (parameter.detach() + step).sin()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def attention_by_rows(q, k, v, causal):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def excess(seq, seq_k, d, causal, dtype):
    """The largest error of FlashAttention over flash-attention's limit: twice that of PyTorch's plain attention."""
    torch.manual_seed(0)
    given = [torch.randn(2, n, d, dtype=dtype) for n in (seq, seq_k, seq_k, seq)]
    sides = []
    for attention, width in (
        (attention_by_rows, torch.float64),
        (attention_by_rows, dtype),
        (FlashAttention.apply, dtype),
    ):
        *qkv, do = (x.to(width, copy=True).requires_grad_() for x in given)
        o = attention(*qkv, causal)
        o.backward(do.detach())
        sides.append([x.detach().double() for x in (o, *(y.grad for y in qkv))])
    eps = torch.finfo(dtype).eps  # with one key, gradients of q and k are 0 and their errors roundings of do
    return max(
        float(
            (mine - exact).norm()
            / (2 * (theirs - exact).norm() + eps * (given[3] if seq_k == 1 else exact / 2).norm())
        )
        for exact, theirs, mine in zip(*sides, strict=True)
    )


def in_file(c, written):
    """{name: (shape, bytes)} of the tensors of a file, or why it is refused."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(written)
        try:
            opened, found = c.value("td_safetensors_open", file.name), {}
            for i in range(c.td_safetensors_count(opened)):
                tensor = c.value("td_safetensors_tensor", opened, i)
                data = torch.empty(tensor.bytes, dtype=torch.uint8)
                c.td_safetensors_read(opened, i, 0, tensor.bytes, data)
                shape = [*tensor.shape[0 : tensor.rank]]
                found[c.ffi.string(tensor.name).decode()] = shape, bytes(data.tolist())
            c.td_safetensors_close(opened)
            return found
        except TandemError as error:
            return str(error)


def of_sample(c, name, x, args, eps=2.0**-23, **options):
    """C's answer to a sample of PyTorch's, or None if C does not offer it."""
    if options or not x.numel() or not x.dim() or eps <= 0:
        return None
    rows, cols, y = x.shape[:-1].numel(), x.shape[-1], torch.empty_like(x)

    def shape(kind, **extents):
        return c.struct(f"td_{kind}_shape", {"dtype": "f32"}, **extents)

    match name.rpartition(".")[2], args:
        case "softmax", [dim] if dim % x.dim() == x.dim() - 1:
            c.td_softmax_forward(c.device, shape("softmax", rows=rows, cols=cols), x, y)
        case "silu", []:
            c.td_silu_mul_forward(c.device, shape("rows", rows=rows, cols=cols), x, torch.ones_like(x), y)
        case "rms_norm", [_, weight]:
            rows = x.numel() // weight.numel()
            of = shape("rmsnorm", rows=rows, cols=weight.numel(), eps=eps)
            c.td_rmsnorm_forward(c.device, of, x, weight, y, torch.empty(rows))
        case "embedding", [ids]:
            y = torch.empty(*ids.shape, cols)
            c.td_embedding_forward(
                c.device, shape("embedding", tokens=ids.numel(), vocab=rows, d_model=cols), ids, x, y
            )
        case "cross_entropy", [targets] if targets.shape == x.shape[:1]:
            of, y = shape("cross_entropy", rows=rows, vocab=cols), torch.empty(())
            work = c.work(c.value("td_cross_entropy_work_bytes", c.device, of))
            c.td_cross_entropy_forward(c.device, of, x, targets, y, torch.empty(rows), work)
        case _:
            return None
    return y


class Peers(unittest.TestCase):
    def test_attention_of_ragged_lengths(self):
        pairs = [(1, 1), (1, 301), (301, 1), (97, 259), (259, 97), (511, 513)]
        for pair, d, causal, dtype in itertools.product(
            pairs, (59, 128), (False, True), (torch.float32, torch.bfloat16)
        ):
            with self.subTest(pair=pair, d=d, causal=causal, dtype=dtype):
                self.assertLessEqual(excess(*pair, d, causal, dtype), 1)

    def test_every_optimizer_with_its_options_is_sharded(self):
        self.enterContext(unittest.mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"))
        torch.manual_seed(0)
        weights, tried = [torch.randn(5, 3), torch.randn(4, 4)], 0
        for info in optim_db:
            cls = info.optim_cls
            for given in [] if cls.__name__ in REFUSED else info.optim_inputs_func(device="cpu"):
                with self.subTest(optimizer=cls.__name__, options=given.desc):
                    mine = trained(lambda ps, c=cls, o=given.kwargs: ShardedOptimizer(ps, c, **o), weights)
                    theirs = trained(lambda ps, c=cls, o=given.kwargs: c(ps, **o), weights)
                    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
                    tried += 1
        self.assertGreater(tried, 60)

    def test_a_step_with_arguments_of_its_own(self):
        class Noting(torch.optim.SGD):
            def step(self, closure=None, notes=None):
                notes.append(5)

        self.enterContext(unittest.mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="1"))
        notes = []
        ShardedOptimizer([torch.nn.Parameter(torch.ones(3))], Noting, lr=0.1).step(notes=notes)
        self.assertEqual(notes, [5])

    def test_operations_of_their_samples(self):
        names = {
            "softmax",
            *map("nn.functional.{}".format, ("silu", "embedding", "rms_norm", "cross_entropy")),
        }
        c, tried = self.enterContext(Library().open()), set()
        for info in (op for op in op_db if op.name in names and not op.variant_test_name):
            for sample in info.sample_inputs("cpu", torch.float32):
                mine = of_sample(c, info.name, sample.input.contiguous(), [*sample.args], **sample.kwargs)
                if mine is not None:
                    exact = sample.transform(
                        lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
                    )
                    right = info.op(exact.input, *exact.args, **exact.kwargs)
                    torch.testing.assert_close(mine.double(), right, rtol=1e-6, atol=1e-6)
                    tried.add(info.name)
        self.assertEqual(tried, names)

    def test_a_file_with_one_other_byte_is_read_by_both_or_none(self):
        c, draw, both = self.enterContext(Library().open()), random.Random(1), 0
        whole = save(
            {"aa": torch.ones(2, 3), "bb": torch.ones(3).bfloat16(), "cc": torch.ones(2, 0)}, {"k": "v"}
        )
        for _ in range(1500):
            at = draw.randrange(8 + int.from_bytes(whole[:8], "little"))
            changed = whole[:at] + draw.choice('{}[]",:0123456789 abF\\').encode() + whole[at + 1 :]
            theirs, mine = None, in_file(c, changed)
            with contextlib.suppress(SafetensorError):
                theirs = {name: (of["shape"], bytes(of["data"])) for name, of in deserialize(changed)}
                both += 1
            self.assertEqual(None if isinstance(mine, str) else mine, theirs, f"{changed}: {mine}")
        self.assertGreater(both, 50)

    def test_attention_of_their_samples(self):
        (info,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
        tried = 0
        for sample in info.sample_inputs("cpu", torch.float32):
            q, (k, v, *masks), options = sample.input, sample.args, sample.kwargs
            causal = bool(options.get("is_causal"))
            ours = (
                q.shape[:-2] == k.shape[:-2]
                and k.shape == v.shape
                and not masks
                and options.get("attn_mask") is None
            )
            if not ours or options.get("dropout_p") or options.get("enable_gqa") or options.get("scale"):
                continue
            with self.subTest(q=[*q.shape], k=[*k.shape], causal=causal):
                folded = [x.detach().flatten(0, -3).contiguous().requires_grad_() for x in (q, k, v)]
                exact = [x.detach().double().requires_grad_() for x in folded]
                o = FlashAttention.apply(*folded, causal)
                right = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal)
                torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
                o.sum().backward(), right.sum().backward()
                for x, y in zip(folded, exact, strict=True):
                    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-5)
                tried += 1
        self.assertGreater(tried, 3)


def course(folder):
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(folder / "tests", Path(copy, "tests"))
        shutil.copy(Path(__file__).with_name("course_adapters.py"), Path(copy, "tests/adapters.py"))
        paths = f"{copy}:{Path(__file__).parents[1]}:{folder}/cs336-basics:{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
        return subprocess.run(command, cwd=copy, env=os.environ | {"PYTHONPATH": paths}).returncode


def safetensors(file):
    """The files that its tests hold as bytes are opened or refused as they expect."""
    parts = re.split(r'let serialized = (b"(?:\\.|[^"\\])*");', file.read_text().partition("#[test]")[2])
    wrong = 0
    with Library().open() as c:
        for given, after in zip(parts[1::2], parts[2::2], strict=True):
            written, refused = ast.literal_eval(given), "Err(" in after.split("#[test]")[0]
            found = in_file(c, written)
            if refused != isinstance(found, str):
                wrong += 1
                print(f"{written}: {found}")
    print(f"{len(parts) // 2} files, {wrong} of them wrong")
    return wrong > 0 or len(parts) < 3


def flash_attention(file):
    """Attention of every length and head size that the file's tests name."""
    pairs, sizes, worst = set(), set(), 0.0
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize":
            name, values = ast.unparse(node.args[0]).strip("'"), node.args[1]
            for value in getattr(values, "elts", []) if name in ("seqlen_q,seqlen_k", "d") else []:
                with contextlib.suppress(ValueError):  # a length that is computed
                    (sizes if name == "d" else pairs).add(ast.literal_eval(value))
    for pair, d, causal in itertools.product(sorted(pairs), sorted(sizes), (False, True)):
        found = excess(*pair, d, causal, torch.bfloat16)
        worst = max(worst, found)
        if not found <= 1:
            print(f"{pair}, head size {d}, causal {causal}: {found:.2f} of the limit")
    print(f"{len(pairs)} pairs of lengths, {len(sizes)} head sizes: at most {worst:.2f} of the limit")
    return not worst <= 1 or not pairs or not sizes


if __name__ == "__main__":
    if sys.argv[1:2] == ["--suite"]:
        suite = Path(sys.argv[2]).resolve()
        adapters = {"tests/test_flash_attn.py": flash_attention, "safetensors/src/tensor.rs": safetensors}
        found = [run(suite / name) for name, run in adapters.items() if (suite / name).is_file()]
        sys.exit(found[0] if found else course(suite))
    unittest.main()
