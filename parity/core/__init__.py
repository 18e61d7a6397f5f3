"""What a module provides, and what it gets.

A module is a file parity/<name>.py, or a package parity/<name>/, with three names. It imports torch, ref, what
modules share (parity/shared/) and this package. It has no path, clock or file of its own: drawing, calling C,
judging, timing, recording and writing pages are core's. A package has its cases and run() in __init__.py, its
tolerances and the bars that its figures are held against in rules.py, and its page in page.py; several pages end in
_page.py. Pages may import from the rest. No result depends on them: an edit of a page has nothing measured again.

    cases(profile, device)   yields Case objects for "quick" (5 minutes in all), "standard" (15 minutes; ci/test judges
                             their errors) or "full" (whole grids), for the "cpu" or for "cuda", one GPU
    run(case, draw, c)       computes one case on every side and returns {impl: side, ...}, described below
    runs(case)               optional: the modules of libtandem that the case calls, apart from the one of its own name
                             and those that this one calls. After an edit of them the case is measured again
    report(page, records)    writes reports/<machine>/<name>.md from records alone; never runs anything

Case(deliverable, *, measure, seconds, repeats, alone, needs_bytes, in_turn, alternate, again, together, stage, ahead,
     reference, config, **keys)
    keys         what the record's "case" holds: batch, heads, seq, seq_k, head_dim, dtype, causal, pass, size, ...
                 with the meaning and spelling of docs/parity.md, "Records". `case.seq` reads one
                 (`case["pass"]`, where the name is a word of Python), `case.get("seq_k", 0)` with a default.
                 Values are JSON scalars.
                 `ranks`: how many ranks compute the case together; no key: one process that knows of no ranks. The
                 core starts so many processes on this host, each of which calls run() and measures in step with the
                 others: a sample begins when all have come and is the time of the slowest; a side's status and error
                 are those of the worst rank. Such a case says its `repeats` if it is timed. On GPUs each rank has
                 one; too few are `unsupported`. A module that only counts ranks has a name RUNS_RANKS = True
    measure      words of "error time memory", in one string; default "error"
    seconds      the time one run of the case is expected to take; default 0.2. Earlier records know better
    repeats      timed repetitions of each side; default: as many as a time budget allows. The case key `warmup`,
                 where there is one, is the number of untimed calls before them
    alone        True: a fresh process of its own under a memory limit, for cases that are hungry or must be cold
    needs_bytes  memory that the hungriest side is known to need; where the machine has less, every side whose
                 own `needs_bytes` does not say otherwise is `oom` without being tried
    in_turn      True: one side after the other is opened, measured and closed, where together they would not fit;
                 else their calls alternate
    alternate    of a case in turn: sides whose calls alternate all the same, as many of them from the left as there is
                 memory for by their `needs_bytes`. One of them may be PyTorch's: the record's `ratio` is over it
    again        of a case in turn: sides that wait for the host, and whose times differ from process to process. They
                 are timed in a second process as well. The record's time is that of the faster one, and `processes`
                 has both
    together     calls in a row that make up one timed sample, default 1: steps that nothing waits for in between. A
                 sample is their mean
    stage        cases of a lower stage run first, whatever their module; default 0. A sweep that is cut short has them
    ahead        True: the module also has ahead(case, draw), which does what is kept on disk from then on,
                 such as compiling. It is called before the case is timed, in a process of its own, beside those of
                 other cases. Until all are done only cases whose errors alone are measured run, whatever their stage
    reference    the name that run() will give as its "reference", where this was not always so: only records that say
                 the same are results of the case as it is now. default: whatever run() gives
    config       {impl: {"graph": True, "keep": "all", ...}}: the switches that run() gives its sides, which takes them
                 from here (`case.config["c"]`). They stand in the side's record, and a case whose newest record has
                 others is measured again. default: none, for sides whose names say all

draw             inputs seeded by the case's name and the tensor's, so a case is the same alone, in a sweep, and on
                 every device: the CPU draws them, and they are then on the device
    draw.device                                          where they are, a torch.device, for a module's own tensors
    draw.normal(name, shape, dtype, std=1.0, mean=0.0)   draw.uniform(name, shape, dtype, low=0.0, high=1.0)
    draw.integers(name, shape, dtype="i64", low=0, high=...)      tokens (i64), or small whole numbers in any dtype
    draw.quickly(name, shape, dtype, std=1.0, mean=0.0)  normal, drawn by the device itself: weights of a large model
                                                         whose time alone matters
    draw.poisoned(shape, dtype)                          an output: 0xFF bytes between fences, for C to overwrite
    Inputs belong to both sides and must not be written: hand an operation that works in place a .clone().

c                libtandem. `c.td_xyz(...)` calls the function of that name; a td_status other than TD_OK is raised
                 as TandemError with td_last_error(). A tensor is passed as its address, no copy, after checking that
                 it is contiguous, on C's device, and of the pointer's type (void * takes any dtype); None is NULL.
                 Host memory is a c.ffi.new("float *")
    c.device                                the handle of the device; on a GPU it queues on PyTorch's current stream
    c.own_stream(own)                       True: C queues on its device's own stream instead, which goes ahead of its
                                            others; False: on PyTorch's again. The device is waited for first
    c.on                                    what parity.core.device says of it: c.on.kind, c.on.synchronize()
    c.struct("td_x_shape", case, field=...) a struct whose fields are filled by name: keywords first, then the
                                            case's keys, else 0. "bf16" becomes TD_BF16, and so for every enum
                                            ("course2025" -> TD_ADAMW_COURSE2025); of "tf32" and "bf16_mixed" a td_dtype
                                            becomes TD_F32 and TD_BF16, a field tf32 is set, and a td_precision says
                                            all of it. A nested struct takes the same case, or a dict given by keyword
    c.value("td_x_work_bytes", c.device, desc)   calls a function that ends in an `out` pointer, returns what it got
    c.create("td_transformer_create", c.device, config)   likewise; its _destroy runs when the case is over, or with
                                            c.destroy(object)
    c.work(nbytes)                          scratch on the device, 256-byte aligned, freed when the case is over;
                                            c.free(block) gives it back before
    c.ranks                                 of a case of several ranks: .rank and .ranks; .comm("mpi"), libtandem's
                                            communicator over that backend, which lives as long as the processes, and
                                            .comm("nccl", nccl_ctas=40), one with that many multiprocessors;
                                            .library("mpi"), its name; .barrier(); .same(tensor), whether all ranks
                                            have the same bits; .gathered(value), every rank's; .session, a `c` on the
                                            communicators' own device, for what queues collectives itself, and is
                                            destroyed by the side's close. torch.distributed is ready, over Gloo and on
                                            GPUs NCCL
    c.bound("td_xyz", ...)                  that call with arguments looked up once, to time what takes microseconds
    c.side("c_naive")                       the same for another C variant of the case, on a device of its own
    c.tensor(address, shape, dtype)         a tensor that looks at C's memory, no copy
    c.bytes_peak()                          peak bytes of the device since the case began
    c.ffi                                   the cffi object, for the rest: c.ffi.sizeof("td_adamw")

run returns {impl: side, ..., "truth": outputs, "rule": {...}, "equal": function}. Impl names are "c",
"torch_eager" and the others of docs/parity.md, "Records"; a side whose name starts with "c" and is alone or followed
by "_" is judged.
    outputs      {"o": tensor, "loss": 3.5, "ln": "f32"}: tensors, numbers, strings. All sides of a case have the
                 same output names, shapes and dtypes; "truth" has them in float64 and may lack some
    side         outputs, or a function of no arguments that returns them (needed for time and memory; the function
                 must do its whole work each time it is called, C's twice where it is judged, and return tensors that
                 later calls may overwrite),
                 or Side(call, before=..., open=..., close=..., flops=..., nbytes=..., needs_bytes=..., holds=...,
                 record={...}):
        before       called untimed before each call of `call`: a forward pass before a timed backward
        open, close  called before the first call and after the last: what the side needs, and its giving back. A side
                     that failed, in its open as well, is closed too
        flops        of one call, for "tflops";  nbytes: that one call must move, for "gb_s"
        needs_bytes  memory this side needs, against the case's
        holds        a function that lists the side's own tensors that live on between calls (parameters, gradients,
                     moments; no inputs), for its memory. What C allocates on its device need not be listed
        record       further keys of the record, such as {"series": {"loss": [...]}}, or a function that
                     returns them after the calls
    truth        float64 outputs, or a function that returns them (called only when the error is measured)
    rule         optional {output name or pattern: rule}: the default is parity() of docs/parity.md; also
                 equal() (same bits as torch), equal("truth") (exactly the truth), within(rel_l2=..., max_abs=...)
                 (against the truth where it has that output, else against the first torch side), and
                 amid("torch_other") (as near to the reference as that side is, for what has no truth but noise)
    equal        optional: a function that returns outputs, or some of them, by the reference's formula. It runs
                 several times under parity.core.equals.Sequential, with another order of every sum each time:
                 answers as good as PyTorch's. Default: the reference side itself
    reference    optional: the name of the side that C is judged against; default "torch_eager", else the first
                 torch side. It must be the case's `reference`, where that has one

Memory is what `before` and `call` need beyond the inputs: outputs, saved tensors, scratch, and what the side holds. C's
is the device recorder's peak since the case began plus the outputs that live outside the device; PyTorch's is its
allocator's peak during the call, and of a side in its turn on a GPU also all that it has allocated since it was opened,
so that `holds` need not list it. A second C variant in one case works on a device of its own, c.side("c_naive"), so
that its memory is its own.

page             the report of one module
    page.section(row, question="")          begins the answer to a row of core/handouts.py, or to a row of the module's
                                            own with its question. page.question(text): a section of no row
    page.say(**values)                      the answer, by the template "## row" of parity/words/<module>.j2: a line is
                                            a sentence, at most four of 25 words and 3 numbers. A sentence whose values
                                            are missing or None is left out. page.working(**values): "## row working"
    page.table(rows, name, columns={...}, units={...}, digits={...}, more=False, expected=0)   rows are dicts;
                                            columns selects, orders and titles.
                                            `more`: nobody asks for it, it stands in <module>_tables.md. `expected`:
                                            how many rows the question asks for
    page.note(text)                         a line that explains the table or the picture that follows
    page.plot(name, curves, x=..., y=..., title=..., log=True, ceilings={...})   curves {impl: (xs, ys)} or {panel:
                                            {impl: (xs, ys)}}. core/plot.py knows what each impl looks like
    page.timeline, page.stack, page.bars    other pictures, as core/plot.py has them
    page.lacks(text)                        what the question asks for and nobody measured
    page.method(part="", **values)          a paragraph of the last section, how it was measured, by "## method part"

records          a Records object: the newest result of each (case, impl) of the module
    records.only(deliverable, impl=..., **keys)   a Records with fewer rows; a list means any of its values
    records.where(wanted)                   those records of which wanted(record) is true
    records.values(key)                     the values of a case key, in order;  records.impls() likewise
    records.value(column, impl="c", **keys) one number, NaN where nothing was measured
    records.wide(keys, column, base=None)   a row a case: the keys, a number an impl (oom and failures in words) and,
                                            with base="torch_eager", "c / torch_eager"
    records.curve(x, column, impl)          (values of the case key x, the number at each), for a plot
    records.ratio(column, over="torch_eager", impl="c")    array of column(impl) / column(over) over the cases
    A column is one of view.MEASURED, such as ms (the median), or a key of the record, as "error.outputs.lse.rel_l2".
    Records may be few: a page is written from whatever was measured so far.

A complete example is ci/module/template/: ci/new-module NAME makes a module of it, with its words in parity/words/.
"""

from parity.core.case import Case, Side, amid, equal, grid, parity, within
from parity.core.draw import DTYPES, NAMES

__all__ = ["DTYPES", "NAMES", "Case", "Side", "amid", "equal", "grid", "parity", "within"]
