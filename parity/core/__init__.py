"""What a module provides, and what it gets.

A module is a file parity/<name>.py or a package parity/<name>/. It imports torch, ref, parity/shared/ and this package.
It has no path, clock or file of its own: core draws, calls C, judges, times, records and writes pages. A package has
cases and run() in __init__.py, tolerances in rules.py and its page in page.py or *_page.py. Pages may import the rest.
No result depends on a page: after an edit of a page nothing is measured again.

    cases(profile, device)   yields the Case objects of "quick" (5 minutes in all), "standard" (15 minutes) or "full"
                             (the handouts' whole grids), for the "cpu" or for "cuda", one GPU
    run(case, draw, c)       computes one case on every side: {impl: side, ...}, see below
    runs(case)               optional: the modules of libtandem that the case calls, besides its own and what that one
                             calls. After an edit of them the case is measured again
    report(page, records)    writes reports/<machine>/<name>.md from records alone; runs nothing
    RUNS_RANKS = True        the module counts ranks or starts them itself

Case(deliverable, *, measure, seconds, ..., **keys)
    keys         the record's "case": batch, heads, seq, head_dim, dtype, causal, pass, size, ... as docs/parity.md
                 spells them; JSON scalars. `case.seq`, `case["pass"]` and `case.get("seq_k", 0)` read one.
                 `ranks`: so many processes of this host compute the case together. Each calls run(). A sample begins
                 when all ranks have come, and is the time of the slowest. Status and error are the worst rank's. Such a
                 case needs `repeats` if it is timed. On GPUs each rank has one GPU; with too few it is `unsupported`
    measure      words of "error time memory" in one string; default "error"
    seconds      the expected time of one run, if no record tells; default 0.2
    repeats      timed calls of each side; default: as many as a time budget allows. The case key `warmup` is the number
                 of untimed calls before them
    alone        True: a fresh process under a memory limit, for cases that need much memory or must be cold
    needs_bytes  memory that the largest side needs. If the machine has less, each side is `not run`, unless its own
                 `needs_bytes` says otherwise
    in_turn      True: one side after the other is opened, measured and closed, if they do not fit together.
                 False: their calls alternate
    again        sides of a case in_turn that wait for the host: their times differ from process to process. They are
                 timed in a second process too. The faster time counts, and `processes` has both
    together     calls in a row that make one timed sample, which is their mean; default 1
    stage        cases of a lower stage run first, whatever their module; default 0
    config       {impl: {"graph": True, ...}}: switches of sides. run() takes them from here, and records have them. A
                 case whose newest record has other switches is measured again

draw             parity.core.draw.Draw: normal, uniform, integers, quickly, poisoned; draw.device. Inputs are seeded
                 by the names of the case and the tensor: they are the same alone, in a sweep and on every device. No
                 side may write them: an operation that works in place gets a .clone()

c                tandem.library.Session. `c.td_xyz(...)` calls a function of libtandem. A tensor is passed as its
                 address if it is contiguous, on C's device and of the pointer's type; None is NULL. Host memory is a
                 c.ffi.new("float *"). Also struct, value, create, destroy, work, free, bound, side, tensor, own_stream.
                 c.device is C's handle of the device, c.on parity.core.device's object. Objects of create() and blocks
                 of work() end with the case
    c.ranks      of a case of ranks: parity.core.rank.Ranks: rank, ranks, comm, barrier, same, gathered, session

run returns {impl: side, ..., "truth": outputs, "rule": {...}, "equal": function}. Names of sides are in
parity/core/sides.py. "c" and names that begin with "c_" are judged.
    outputs      {"o": tensor, "loss": 3.5, "ln": "f32"}: tensors, numbers, strings; the same names, shapes and dtypes
                 on all sides. "truth" has them in float64 and may lack some
    side         outputs; or, for time and memory, a function that returns them, or None for none, and does its whole
                 work at each call; or Side(call, before=..., open=..., close=..., ...):
        before       called untimed before each call
        open, close  called before the first call and after the last, close also after a failure
        flops        of one call, for "tflops";  nbytes: that one call must move, for "gb_s"
        needs_bytes  memory of this side, in place of the case's
        holds        lists the side's tensors that live between calls and are no inputs, for its memory. Blocks on C's
                     device need not be listed
        renew        of a call that goes on from the one before: called before the last sample in place of `before`,
                     begins again from the inputs, which were changed
        answer       of a timed call that returns nothing: called untimed after the last one, returns its outputs
        record       further keys of the record, or a function that returns them after the calls
    truth        float64 outputs, or a function that returns them
    rule         {output name or pattern: rule}; default parity(). Others: equal() (torch's bits), equal("truth"),
                 within(rel_l2=..., max_abs=...) and amid("torch_other") (as near to the reference as that side)
    sample       of a timed case without a truth: a function of outputs that returns {name: (a part, its truth)}.
                 sampled(tensor) takes some elements
    equal        returns outputs by the reference's formula. It runs under parity.core.equals.Sequential, several times,
                 with other orders of sums. Default: the reference side
    reference    the side that C is judged against; default "torch_eager", else the first torch side

Memory is what `before` and `call` need beyond the inputs: outputs, saved tensors, scratch, and what the side holds. C's
is the device's peak plus outputs elsewhere. PyTorch's is its allocator's peak in the call; in_turn on a GPU, all that
it has allocated since the side was opened.

page             the report of one module, parity.core.report.Page: section, question, say, working, table, note, plot,
                 timeline, stack, bars, lacks, method
records          parity.core.view.Records: the newest result of each (case, impl) of the module. Records may be few: a
                 page is written from whatever was measured

A complete example is ci/module/template/: ci/new-module NAME makes a module of it, with its words in parity/words/.
"""

from parity.core.case import Case, Side, amid, equal, grid, parity, within
from parity.core.draw import Drawn, sampled
from tandem.library import DTYPES, NAMES

__all__ = ["DTYPES", "NAMES", "Case", "Drawn", "Side", "amid", "equal", "grid", "parity", "sampled", "within"]
