"""A driver runs the step of one side: C's or PyTorch's.

A Side calls open() or open_whole() first, then the step that it times, and close() last:

    open()           what phased() needs
    open_whole()     what both need; a step that is to be captured is captured here
    phased()         a step that adds a sample to each phase of `times`, the device synchronised at its end
    whole()          a step without a look at the clock
    close()          gives everything back
    begin()          the initial weights, no moments
    answer()         of the last step: how far weights moved, and the loss; or the logits
    holds()          the tensors that live on between steps
    peaks            keys of the record that open_whole() alone can tell
"""

from time import perf_counter

from parity.core import Side, sampled
from parity.core.clock import statistics
from parity.shared.model import ADAMW, TandemTrainer, copy_weights, forget, moved, state_dict, torch_model
from ref import bench as ref
from ref.transformer import fused_attention

PHASES = ("forward", "backward", "optimizer")
WARMUPS = (0, 1, 2, 5)  # steps left out before the ten that are timed
WHOLE_CONTEXT = 512  # of the steps that are compared with compiled PyTorch
# Timed steps are judged by their last loss and weights. With 1e-3 right sides part within ten steps: mixed
# precision of PyTorch is then off float64 by up to 8 % in the loss, as C's is (H200, 5 draws of `small`).
LEARNING_RATE = 1e-5
# The judged step is an optimizer's first. There the course's AdamW divides eps by sqrt(1 - beta2), and
# torch.optim's does not: 1e-8 is 3e-7, as large as gradients of long contexts. With this eps both agree.
COURSE_EPS = ADAMW["eps"] * (1 - ADAMW["beta2"]) ** 0.5
# Of the cases that measure what warm-up changes: the handout's, and in bf16 a context that no other case has.
COLD = (("f32", WHOLE_CONTEXT), ("bf16_mixed", 384))


class Driver:
    """What both drivers have in common."""

    def __init__(self, case, on, impl, state, ids, targets):
        self.case, self.on, self.switches = case, on, case.config[impl]
        self.state, self.ids, self.targets = state, ids, targets
        self.training, self.captured = case["pass"] != "inference", self.switches["graph"]
        self.times, self.peaks = ref.Times(), {}

    def side(self, values, flops):
        """The side whose phases or whole steps are timed, as its switches say. Its record has these `values`."""
        whole, case = self.switches["timed"] == "whole", self.case

        def record():
            if whole:
                return self.peaks | {"values": values}
            # Of the timed calls: those after the warm-up, without the one that weighs the memory.
            timed_calls = slice(case.warmup, case.warmup + case.repeats)
            found = {phase: getattr(self.times, phase)[timed_calls] for phase in PHASES}
            phases = {phase: statistics(samples) for phase, samples in found.items() if samples}
            return {"phases": phases, "values": values}

        how = dict(open=self.open_whole if whole else self.open, close=self.close, holds=self.holds)
        how |= dict(renew=self.begin, answer=self.answer)
        return Side(self.whole if whole else self.phased, flops=flops, record=record, **how)


class CDriver(Driver):
    """C's step, queued or captured. Weights are updated after the backward pass or during it."""

    def __init__(self, case, c, impl, state, ids, targets):
        self.c = c.side(impl)
        super().__init__(case, self.c.on, impl, state, ids, targets)
        until = {} if self.training else {"until": "forward"}
        hyper = {
            "kind": "adamw",
            "adamw": {"variant": "course2025", **ADAMW, "lr": LEARNING_RATE, "eps": COURSE_EPS},
        }
        how = {"hyper": hyper} | until
        self.model = TandemTrainer(case, self.c, self.switches["attention"], self.switches, **how)
        self.logits = None

    def open(self):
        self.model.open()
        self.begin()
        sms = self.model.update_sms() if self.training and self.on.torch.type == "cuda" else 0
        self.peaks |= {"update_sms": sms} if sms else {}

    def open_whole(self):
        self.open()
        if not self.training:
            self.model.load(self.ids, self.targets)
            self.forward()  # which tells where logits of later passes are as well
        for _ in range(2 if self.captured else 0):  # the second one is captured
            self.whole()

    def close(self):
        self.model.close()

    def begin(self):
        self.model.begin(self.state)

    def answer(self):
        if not self.training:
            return {"logits": self.model.read(self.logits, self.ids.shape)}
        self.c.td_train_settle(self.model.train)
        return {"loss": self.model.loss()} | moved(
            self.state, state_dict(self.c, self.model.model, take=sampled)
        )

    def holds(self):
        return ()

    def whole(self):
        self.model.step(self.ids, self.targets)

    def phased(self):
        self.model.load(self.ids, self.targets)
        passes = [self.forward]
        passes += [self.model.backward, self.model.update] if self.training else []
        laps = [self.lap()]
        for run in passes:
            run()
            laps.append(self.lap())
        for phase, start, end in zip(PHASES, laps, laps[1:], strict=False):
            getattr(self.times, phase).append(1e3 * (end - start))

    def forward(self):
        self.logits = self.model.forward()

    def lap(self):
        self.c.td_device_synchronize(self.c.device)
        return perf_counter()


class TorchDriver(Driver):
    """PyTorch's step: eager or compiled, with the attention and optimizer of its switches, or captured as a graph."""

    def __init__(self, case, c, impl, state, ids, targets):
        super().__init__(case, c.on, impl, state, ids, targets)
        self.trainer = self.replay = self.result = None

    def open(self):
        switches = self.switches
        options = {"attend": fused_attention} if switches["attention"] == "fused" else {}
        options["checkpoint_layers"] = switches.get("checkpoint_layers", 0)
        self.trainer = ref.Trainer(
            torch_model(self.case, self.state, **options),
            self.ids,
            self.targets,
            mode="train" if self.training else "forward",
            autocast=switches["autocast"],
            compiled=switches["compiled"],
            fused=switches.get("optimizer") == "fused",
            blocks=switches.get("blocks", False),
            synchronize=self.on.synchronize,
        )
        self.trainer.times = self.times
        for group in self.trainer.optimizer.param_groups if self.training else ():
            group |= {"lr": LEARNING_RATE} | ({"eps": COURSE_EPS} if "variant" in group else {})

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
        self.trainer = self.result = None

    def begin(self):
        copy_weights(self.trainer.model, self.state)
        forget(self.trainer.optimizer)

    def answer(self):
        known = self.result is not None  # a replay returns nothing
        if not self.training:
            return {"logits": self.result} if known else {}
        weights = {name: sampled(p) for name, p in self.trainer.model.named_parameters()}
        return moved(self.state, weights) | ({"loss": self.result.reshape(1)} if known else {})

    def holds(self):
        held = list(self.trainer.model.parameters())
        if self.trainer.optimizer:
            states = self.trainer.optimizer.state.values()
            held += [value for state in states for value in state.values() if hasattr(value, "data_ptr")]
        return held

    def whole(self):
        step = self.replay or self.trainer.whole
        self.result = step()

    def phased(self):
        self.result = self.trainer.step()
