"""libtandem's own benchmark of ranks: a side's times, memory and timelines by td_bench_run."""

from parity.shared.model import quick_start, train_options
from parity.shared.pages import MIB
from parity.shared.ranked import hyper_of

ALIGNED = 256  # bytes: TD_ALIGNMENT
# Names of records, and of td_bench_rank.
TIMES = {name: name for name in ("step", "collectives", "tail", "waits")}
TIMES |= {"without": "silent", "beside": "hidden"}
POINTS = ("made", "before_update", "after_update")
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")  # of td_comm_span
PARTS = ("parameters", "gradients", "optimizer_state", "activations", "buffers")


class BenchRanks:
    """A run of all ranks, with the case's model and links. Close it."""

    def __init__(self, case, c, backend, steps, warmup, state="whole"):
        self.c = c.ranks.session
        switches = case.config[f"c_{backend}"]
        fields = train_options(switches)
        how = dict(model=fields["model"], hyper=hyper_of(case), time=fields["time"], graph=fields["capture"])
        how |= dict(mode="train", timed="whole", state=state, warmup=warmup, steps=steps)
        config = self.c.struct("td_bench_config", case, **how)
        comm = c.ranks.comm(backend, switches.get("nccl_ctas", 0))
        self.c.own_stream(True)
        try:
            with quick_start(self.c, case.ranks):
                self.result = self.c.value("td_bench_run", self.c.device, comm, config, None, None)
        finally:
            self.c.own_stream(False)
        summary = self.c.value("td_bench_summary_of", self.result)
        self.ranks = [summary.of[rank] for rank in range(summary.ranks)]

    def close(self):
        self.c.td_bench_result_destroy(self.result)

    def values(self):
        """Medians in ms, the mean of the ranks; calls and bytes of a rank; and its NCCL windows."""
        found = {
            name: sum(getattr(rank, field).median for rank in self.ranks) / len(self.ranks)
            for name, field in TIMES.items()
        }
        found["exposed"] = found["step"] - found["without"]
        found["spread"] = max(rank.step.std / rank.step.mean for rank in self.ranks)
        first = self.ranks[0]
        found |= {"calls": first.calls, "bytes": first.bytes}
        return found | ({"windows": first.windows} if first.windows else {})

    def memory(self):
        """MiB of every rank: parts, what is there at each point, and the peak."""
        found = {f"{part}_mib": [getattr(rank, part) / MIB for rank in self.ranks] for part in PARTS}
        for i, point in enumerate(POINTS):
            found[f"{point}_mib"] = [rank.current[i] / MIB for rank in self.ranks]
        for name in ("gathered", "reduced") if self.ranks[0].gathered_layers else ():
            layers, tables = (
                [getattr(r, f"{name}_{part}") for r in self.ranks] for part in ("layers", "tables")
            )
            found[f"{name}_mib"] = [sum(pair) / MIB for pair in zip(layers, tables, strict=True)]
        return found | {"peak_mib": [max(rank.peak) / MIB for rank in self.ranks]}

    def timelines(self):
        """In ms: "0 passes", the ends of rank 0's passes and step; "0 begin" and "0 end" of its collectives. If a link
        gathers weights also "0 asked" and "0 there", when a pass needed and had them; "calls", of CALLS; "read in",
        td_pass."""
        found = {}
        for rank in range(len(self.ranks)):
            of = self.c.value("td_bench_timeline_of", self.result, rank)
            spans = [of.spans[i] for i in range(of.count)]
            found[f"{rank} passes"] = [round(ms, 4) for ms in (of.forward_ms, of.backward_ms, of.step_ms)]
            found[f"{rank} begin"] = [round(span.begin_ms, 4) for span in spans]
            found[f"{rank} end"] = [round(span.end_ms, 4) for span in spans]
            waits = [of.waits[i] for i in range(of.wait_count)]
            if waits:
                found[f"{rank} asked"] = [round(wait.begin_ms, 4) for wait in waits]
                found[f"{rank} there"] = [round(wait.end_ms, 4) for wait in waits]
                found["calls"] = [CALLS.index(self.c.ffi.string(span.call).decode()) for span in spans]
                found["read in"] = [getattr(wait, "pass") for wait in waits]
        return found


def elements_of(keys):
    """Of each parameter of the model, and whether its weight is read in f32."""
    d_model, d_ff, vocab = keys["d_model"], keys["d_ff"], keys["vocab"]
    block = [(d_model, True), *[(d_model**2, False)] * 4, (d_model, True), *[(d_model * d_ff, False)] * 3]
    return [(vocab * d_model, True), *block * keys["layers"], (d_model, True), (vocab * d_model, False)]


def gradient_bytes(keys):
    """Bytes of all gradients, each with its padding; 2 bytes an element if they are of 16 bits."""
    size = 4 if keys["dtype"] == "f32" else 2
    return sum(-(-count * size // ALIGNED) * ALIGNED for count, _ in elements_of(keys))
