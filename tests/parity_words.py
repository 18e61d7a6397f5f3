"""Each comparison in a template of parity/words/ is rendered from both sides. They come from Jinja's syntax tree, so a
new one without a row fails."""

import ast
import re
import unittest

from jinja2 import Template, nodes

from parity.core.words import ENVIRONMENT, FOLDER, sentences


class One(float):
    """1.0 for every name, attribute and item that a row does not set."""

    def __new__(cls, value=1.0, **parts):
        one = super().__new__(cls, value)
        one.parts = parts
        return one

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.parts.setdefault(name, One())

    def __len__(self):
        return max(0, int(self))

    def __getitem__(self, name):
        return self.parts.setdefault(str(name), One())


def source(node):
    """The words of an expression, as a row writes them."""
    match node:
        case nodes.Name():
            return node.name
        case nodes.Getattr():
            return f"{source(node.node)}.{node.attr}"
        case nodes.Getitem():
            return f"{source(node.node)}.{source(node.arg)}"
        case nodes.Const():
            return str(node.value)
        case nodes.BinExpr():
            return f"{source(node.left)} {node.operator} {source(node.right)}"
        case nodes.Filter():
            return f"{source(node.node)}#{node.name}"
    raise TypeError(node)


def comparisons():
    """Yields ([file, left, right], operator, node): a condition and a comparison in it."""
    for path in sorted(FOLDER.glob("*.j2")):
        for node in ENVIRONMENT.parse(path.read_text()).find_all((nodes.If, nodes.CondExpr)):
            tests = [node.test] if isinstance(node.test, nodes.Compare) else node.test.find_all(nodes.Compare)
            for test in tests:
                yield [path.stem, source(test.expr), source(test.ops[0].expr)], test.ops[0].op, node


def rendered(node, values):
    """The text of a condition with these values, such as {"flat.ratio": 0.5}; other names are 1."""
    tree = nodes.Template([node if isinstance(node, nodes.If) else nodes.Output([node])])
    names = One(**{name.name: One() for name in tree.find_all(nodes.Name)})
    for path, value in values.items():
        *inner, last = path.removesuffix("#length").split(".")
        at = names
        for name in inner:
            at = at[name]
        at.parts[last] = One(value)
    code = ENVIRONMENT.compile(tree.set_environment(ENVIRONMENT))
    return Template.from_code(ENVIRONMENT, code, {}).render(names.parts)


# file | the number that varies | what it is compared with | words if it is less, or equal |
# words if it is more, or another | other numbers that are not 1
ROWS = """
bench|most.size|small.size||and 1 ms for
bench|ends.c#length|1||, and that of
bench|ends.torch_eager#length|1||, and that of
bench|ends.torch_eager.0.forward, f32 / bf16|1|takes longer|
bench|ends.torch_eager.0.forward, f32 / bf16|1.1|probably waits for|
ddp|held|results|Yes: all 1 results hold.|10 of 1 results hold
ddp|flat.step|naive.step|lowers|raises
ddp|flat.collectives|naive.collectives|fixed cost|
ddp|flat.hidden|0.01|begins after backward|
ddp|held|results|Yes: all 1 results hold, with|10 of 1 results hold
ddp|overlap.collectives|1.05 * naive.collectives||because backward runs meanwhile
ddp|held|results|for every size of bucket|10 of 1 results hold
ddp|c.slow|1.05 * c.fast|hardly matters|
ddp|small.collectives|large.collectives||all-reduces take 10 ms in buckets
ddp|small.collectives|large.collectives||There are
ddp|c.slow|1.05 * c.fast|hardly show it|
ddp|hidden|0.8||hardly show it
ddp|spread|0.05||spread by up to
flash|held|judged|All 1 cases pass|10 of 1 cases pass
flash|held|judged|All 1 cases pass|10 of 1 cases pass
memory|naive_context|context|and 1 MiB in|
memory|naive_context|context||At context 10, the longest of
memory|gradients|0.1 * weights|no optimizer stage|
memory|first.context|last.context||At context 10 tensors
memory|first.context|last.context||a training step takes
memory|first.c_forward|1.2 * first.c_forward_tensors||also reserves
memory|wide.context|short_wide.context||At context 10 a step's peak
memory|wide.context|short_wide.context||There the peak of a forward pass
memory|wide.context|short_wide.context||`context 10` a step's tensors
memory|short_low.torch_eager_forward|short_wide.torch_eager_forward||rises at
memory|low.torch_eager_forward|wide.torch_eager_forward|falls from|
memory|low.c_inference_tensors|wide.c_inference_tensors||C's inference rises
memory|context|2048|by this formula|
memory|context|512|at a longer context|
ops|held|judged|All 1 cases pass|10 of 1 cases pass
shard|held|results|Yes: all 1 results hold|10 of 1 results hold
shard|torch.whole.made|1.5 * torch.whole.parameters||After construction PyTorch holds
shard|c.whole.made|c.whole.after_update|takes all memory at construction|
shard|c.whole.reused|1||gradients reuse
shard|torch.whole.rest - torch.tensors.rest|0.9 * torch.whole.parameters||as much as all gradients
shard|held|results|Yes, within the error|10 of 1 results hold
shard|ranks * total|0.99 * whole|Sharding by|
shard|whole_held|0.99 * whole|most gradients lie|
trace|earlier.apart|0.05|match|differ by
trace|slowed|0.1||profiler shows
trace|mine.both|mine.kernel|the same|`10`
trace|theirs.kernel|mine.kernel|C's kernel|`10`
trace|theirs.both|theirs.kernel|the same|`10`
trace|theirs.rest|0.01||without a name here
trace|theirs.step|theirs.forward|the share falls||mine.forward=2
trace|mine.step|mine.forward|the share falls||theirs.forward=2
trace|least|context|the share falls more||mine.short.0=2 theirs.short.0=2
trace|theirs.short.0 - theirs.short.1|theirs.forward - theirs.step||the share falls more|mine.short.0=2 least=0
trace|mine.short.0 - mine.short.1|mine.forward - mine.step||the share falls more|theirs.short.0=2 least=0
transformer|held|judged|All 1 cases pass|10 of 1 cases pass
"""
# Of sentences that the pages of no record have: file|heading|values|the sentence.
RARE = """
bench|benchmarking_script (c)|gpu=False|In the first step memory is touched for the first time, threads start, \
and the matrix library generates its kernels.
bench|benchmarking_script (c)|torch_eager={"steady": None}|So some work of the first steps, such as allocation, \
still comes after them; which one was not measured.
bench|torch_compile (b)|step=dict(size="L", c=1, best=2, update_differs=False, c_differ=["a", "b"])|C's fastest step \
of L takes 1 ms; the fastest compiled step takes 2 ms; they differ in a, b, PyTorch's first.
bench|gradient_checkpointing|size="xl", batch=4, context=512, asked=False, best=2, other=False|(b) With checkpoints \
of k layers, 2025's xl (`batch 4, context 512`; 2026's was not measured) has C's lowest peak at `k = 2`.
bench|gradient_checkpointing|asked_mib=81920|A step that keeps all activations asked for 81,920 MiB and found no room.
memory|memory_profiling (b)|lost=[512], naive_lost=None|At context 512 PyTorch ran out of the card's memory in \
passes that keep activations.
memory|memory_profiling (c)|wide={"c_inference_tensors": 2}, low={"c_inference_tensors": 3}|C's inference rises from \
2 to 3 MiB there, because C keeps bf16 copies of weights.
shard|fsdp|apart_average=3, weights=9|The bridge's FullyShardedDataParallel, which wraps PyTorch modules, gives other \
bits in 3 of 9 weights than one process that averages the ranks' gradients.
shard|fsdp|apart_whole=0|It has the bits of the whole batch at once, too.
shard|fsdp_accounting|whole_peak=None, total=5|The peak of a step without sharding was not measured, so the saving of \
the peak is not known.
shard|fsdp_accounting|timed=dict(size="L", dtype="f32", mine=2, whole=1, equal=False, whole_differ=[])|A captured step \
of L (`f32`) takes 2 ms in C with full sharding and 1 ms without.
shard|fsdp_accounting|timed=dict(compiled=False, theirs=3, differ=[])|PyTorch's fully_shard takes 3 ms.
shard|leaderboard (2026)|other=None|A B200's peak is 2.5 times an H100's by the data sheet of the GB200.
trace|nsys_profile (b)|size="L", mine={"kernel": "k", "class": "sum", "share": 0.5, "calls": 2, "both": "k", "part": 1}\
|For L the kernel in C is `k` (sum) with 50 % and 2 calls; with backward it is the same (100 %).
"""
NAMES = {("bench", "size", "xl"), ("bench", "dtype", "f32"), ("shard", "flat.verdict", "equal")}
NAMES |= {("trace", "mine.class", "matmul")}  # a name's own words, no verdict


OTHER_SIDE = re.compile(r"theirs|torch_|eager|\bother\b|whole_of|\bbest\b")
# The one place, and what judges: errors, and the times of other people's solutions.
FREE = ("core/comparison.py", "core/allowance.py", "judge/numbers.py", "transformer/__init__.py")


def divided_sides(text, where):
    """Yields the divisions of a Python file or a template that name the side of an operand."""
    if where.endswith(".j2"):
        for node in ENVIRONMENT.parse(text).find_all(nodes.Div):
            # Two dtypes or two sizes of one side have one name at the end.
            if OTHER_SIDE.search(words := f"{source(node.left)} / {source(node.right)}"):
                yield words, source(node.left).rpartition(".")[2] == source(node.right).rpartition(".")[2]
        return
    for node in ast.walk(ast.parse(text)):
        words = ast.unparse(node) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) else ""
        if OTHER_SIDE.search(words):
            yield words, False


class Words(unittest.TestCase):
    def test_only_one_function_divides_the_times_of_two_sides(self):
        files = [*FOLDER.parent.rglob("*.py"), *FOLDER.glob("*.j2")]
        files = [path for path in files if path.relative_to(FOLDER.parent).as_posix() not in FREE]
        self.assertGreater(len(files), 50)
        found = [
            (path.name, text)
            for path in files
            for text, same in divided_sides(path.read_text(), path.name)
            if not same
        ]
        self.assertEqual(found, [])

    def test_a_planted_division_is_found(self):
        planted = (
            ("page.py", "x = row['c (ms)'] / row['torch_eager (ms)']"),
            ("page.py", "x = found[mine]['ms'] / found[whole_of(mine)]['ms']"),
            ("bench.j2", "{{ step.c / step.torch_eager }}"),
        )
        for name, text in planted:
            self.assertEqual([same for _, same in divided_sides(text, name)], [False], text)

    def test_both_sides_have_their_numbers_in_one_order(self):
        for path in FOLDER.glob("*.j2"):
            for row in path.read_text().split("\n## "):
                sides = (re.findall(rf"{{{{ {side}\.(\w+)", row) for side in ("mine", "theirs"))
                mine, theirs = map(dict.fromkeys, sides)
                self.assertEqual([n for n in mine if n in theirs], [n for n in theirs if n in mine], row)

    def test_rare_sentences(self):
        for row in RARE.strip().splitlines():
            module, heading, values, sentence = row.split("|")
            self.assertIn(sentence, sentences(module, heading, eval(f"dict({values})")))

    def test_each_comparison_has_its_words_on_both_sides(self):
        rows = [[*row.split("|"), ""][:6] for row in ROWS.strip("\n").splitlines()]
        found = [row for row in comparisons() if tuple(row[0]) not in NAMES]
        self.assertEqual([row[:3] for row in rows], [key for key, _, _ in found])
        for (_, left, right, *words, others), (key, op, node) in zip(rows, found, strict=True):
            less = 1 if op in ("eq", "ne") else -1
            high = 10 * int(right) if right.isdigit() and int(right) > 1 else 10
            varies = left if "*" not in left and " - " not in left else left.split(" ")[0]
            more = dict(pair.split("=") for pair in others.split())
            texts = [rendered(node, more | {varies: value}) for value in (less, high)]
            for side, (mine, other) in enumerate((words, words[::-1])):
                with self.subTest(key=key, more=bool(side)):
                    self.assertIn(mine, texts[side])
                    self.assertFalse(other and other in texts[side], texts[side])


if __name__ == "__main__":
    unittest.main()
