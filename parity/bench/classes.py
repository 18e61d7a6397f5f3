"""Where the time of a captured step goes, by PyTorch's profiler for all sides: also the kernels of C's graphs, because
CUPTI sees all of a process."""

from torch.profiler import ProfilerActivity, profile

from parity.core import Side
from parity.trace import class_of
from ref.trace import recorded

STEPS = 3
# Groups of classes. While kernels of several run, the time counts for the first of these groups.
GROUPS = {
    "GEMM": ("matmul",),
    "attention": ("attention", "softmax"),
    "norms and elementwise": ("reduction", "elementwise"),
    "other": ("memory", "communication", "other"),
    "optimizer alone": ("optimizer",),
}
GROUP_OF = {name: i for i, names in enumerate(GROUPS.values()) for name in names}


def run(case, drivers, c):
    return {impl: side_of(case, driver, c) for impl, driver in drivers.items()}


def side_of(case, driver, c):
    found = {}

    def call():
        for _ in range(case.warmup):
            driver.whole()
        driver.on.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                driver.whole()
            driver.on.synchronize()
        kernels = [event for event in recorded(profiler) if not (event.on_host or event.annotation)]
        classes = {name: class_of(c, name) for name in {event.name for event in kernels}}
        if unknown := [name for name, its in classes.items() if its == "other" and "td_" in name]:
            raise ValueError(f"the class of {unknown[0]!r} is not known")
        groups = [(event.begin, event.end, GROUP_OF[classes[event.name]]) for event in kernels]
        found["values"] = shares(groups, STEPS)

    return Side(call, open=driver.open_whole, close=driver.close, holds=driver.holds, record=lambda: found)


def shares(kernels, steps):
    """Milliseconds of a step in which each group runs, of (begin, end, group) in microseconds; idle: no kernel runs.
    Their sum is the step."""
    edges = sorted(
        [(begin, 1, group) for begin, _, group in kernels] + [(end, -1, g) for _, end, g in kernels]
    )
    running, spent, before = [0] * len(GROUPS), dict.fromkeys((*GROUPS, "idle"), 0.0), None
    for time, change, group in edges:
        if before is not None:
            name = next((name for name, count in zip(GROUPS, running, strict=True) if count), "idle")
            spent[name] += (time - before) / 1e3 / steps
        running[group] += change
        before = time
    return spent
