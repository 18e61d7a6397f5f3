"""A driver runs the step of one side: C's or PyTorch's.

A timing calls open() or open_whole() first, then the step that it times, and close() last:

    open()           what phased() needs
    open_whole()     what both need; a step that is to be captured is captured here
    phased()         a step that adds a sample to each phase of `times`, the device synchronised at its end
    whole()          a step without a look at the clock
    close()          gives everything back
    holds()          the tensors that live on between steps
    peaks            keys of the record that open_whole() alone can tell
    on               the device
"""

from time import perf_counter

from parity.bench.steps import PHASES
from parity.shared.model import TandemTrainer, torch_model
from ref import bench as ref
from ref.transformer import fused_attention


class CDriver:
    """C's step: queued operation by operation, or captured once and replayed. Weights are updated after the
    backward pass or during it."""

    def __init__(self, case, c, impl, state, ids, targets):
        switches = case.config[impl]
        self.state, self.ids, self.targets = state, ids, targets
        self.training, self.captured = case["pass"] != "inference", switches["graph"]
        self.times, self.peaks = ref.Times(), {}
        self.c = c.side(impl)
        self.on = self.c.on
        until = {} if self.training else {"until": "forward"}
        self.model = TandemTrainer(case, self.c, switches["attention"], switches, **until)

    def open(self):
        self.model.open().begin(self.state)
        sms = self.model.update_sms() if self.training and self.on.torch.type == "cuda" else 0
        self.peaks |= {"update_sms": sms} if sms else {}

    def open_whole(self):
        self.open()
        for _ in range(2 if self.captured else 0):  # the second one is captured
            self.whole()

    def close(self):
        self.model.close()

    def holds(self):
        return ()

    def whole(self):
        self.model.step(self.ids, self.targets)

    def phased(self):
        self.model.load(self.ids, self.targets)
        laps = [self.lap()]
        self.model.forward()
        laps.append(self.lap())
        if self.training:
            self.model.backward()
            laps.append(self.lap())
            self.model.update()
            laps.append(self.lap())
        for phase, start, end in zip(PHASES, laps, laps[1:], strict=False):
            getattr(self.times, phase).append(1e3 * (end - start))

    def lap(self):
        self.c.td_device_synchronize(self.c.device)
        return perf_counter()


class TorchDriver:
    """PyTorch's step: eager; at its best, compiled with its own fused attention and optimizer; or that one,
    captured as a graph."""

    def __init__(self, case, c, impl, state, ids, targets):
        self.case, self.switches = case, case.config[impl]
        self.state, self.ids, self.targets = state, ids, targets
        self.training, self.captured = case["pass"] != "inference", self.switches["graph"]
        self.times, self.peaks = ref.Times(), {}
        self.on = c.on
        self.trainer = self.replay = None

    def open(self):
        attend = {"attend": fused_attention} if self.switches["attention"] == "fused" else {}
        self.trainer = ref.Trainer(
            torch_model(
                self.case,
                self.state,
                **attend,
                checkpoint_layers=self.switches.get("checkpoint_layers", 0),
            ),
            self.ids,
            self.targets,
            mode="train" if self.training else "forward",
            autocast=self.switches["autocast"],
            best=self.switches["compiled"],
            blocks=self.switches.get("blocks", False),
            synchronize=self.on.synchronize,
        )
        self.trainer.times = self.times

    def open_whole(self):
        before = self.on.held_by_torch()
        self.open()
        if not self.captured:
            return

        def capture():
            self.replay = self.trainer.capture()

        # Replays use memory that the allocator counts as free again: the peak is that of the capture.
        held = self.on.held_by_torch()
        peaks = self.on.peak_of_torch(capture)
        self.peaks = {f"{name}_mib": (held[name] - before[name] + peaks[name]) / 2**20 for name in peaks}

    def close(self):
        self.replay = None  # the graph before what it reads
        self.trainer = None

    def holds(self):
        held = list(self.trainer.model.parameters())
        if self.trainer.optimizer:
            states = self.trainer.optimizer.state.values()
            held += [value for state in states for value in state.values() if hasattr(value, "data_ptr")]
        return held

    def whole(self):
        step = self.replay or self.trainer.whole
        step()

    def phased(self):
        self.trainer.step()
