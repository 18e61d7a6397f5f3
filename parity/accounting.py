"""The arithmetic of the write-up: C's formulas against PyTorch's counts on a model that is never allocated."""

from parity.core import Case, Side, equal, grid, within
from parity.shared.pages import valued
from parity.shared.sizes import extents
from ref import accounting as ref
from ref.transformer import SIZES

CONTEXTS = [128, 256, 512, 1024]
LENGTHS = [256, 1024, 4096, 8192, 16384]
RUNS_RANKS = True  # they are counted here, and none is started
# The handout's model and rates: 460 TFLOP/s, and 90 GB/s each way on each axis of the mesh.
XXL = {"d_model": 16384, "d_ff": 53248, "blocks": 126}
MESH = {"flops_per_second": 4.6e14, "bytes_per_second": 2 * 9e10}
MESH |= {"fsdp": 16, "tensor": 4, "fsdp_axes": 2, "tensor_axes": 1}
LINKS = [{"bytes_per_second": 20e9, "seconds_per_call": 50e-6}]
LINKS += [{"bytes_per_second": 230e9, "seconds_per_call": 30e-6}]
STRATEGIES = {"data": "data_parallel_calcs", "fsdp": "fsdp_calcs", "tensor": "tp_calcs"}
RATES = {name: MESH[name] for name in ("flops_per_second", "bytes_per_second")}
LAYER = {"d_model": 16384.0, "d_ff": 53248.0, "devices": 64.0, "tokens": 2.0**20}


def cases(profile, device):
    quick = (profile, device) == ("quick", "cpu")
    for size in ("small", "2.7B") if quick else SIZES:
        for context in (CONTEXTS[0], CONTEXTS[-1]) if quick else CONTEXTS:
            yield Case("memory_accounting", seconds=1, size=size, batch=4, context=context)
    for keys in grid(head_dim=[16, 64, 128], seq=LENGTHS):
        yield Case("attention_accounting", batch=8, dtype="f32", causal=False, **keys)
    for keys in LINKS:
        yield Case("ddp_bucketed_benchmarking", size="xl", **keys)
    yield Case("communication_accounting", **XXL)
    for strategy, deliverable in STRATEGIES.items():
        yield Case(deliverable, strategy=strategy)
    yield Case("fsdp_tp_calcs", strategy="fsdp_tp")
    yield Case("alternate_ring_all_reduce", ranks=8, bytes=2**30)


def run(case, draw, c):
    parts = {
        "memory_accounting": model,
        "attention_accounting": attention,
        "ddp_bucketed_benchmarking": ddp,
        "communication_accounting": xxl,
        "alternate_ring_all_reduce": ring,
        "fsdp_tp_calcs": both_strategies,
    } | dict.fromkeys(STRATEGIES.values(), parallel)
    return parts[case.deliverable](case, c)


def sides(mine, theirs, rule=None, **more):
    """All of C's figures are in the record. The figures that PyTorch can count too are compared."""
    return {
        "c": Side(lambda: {name: mine[name] for name in theirs}, record={"values": {**mine, **more}}),
        "torch_eager": lambda: theirs,
        "rule": {"*": rule or equal()},
    }


def fields(struct, *names):
    return {name: getattr(struct, name) for name in names}


def model(case, c):
    shape = extents(case.size)[0]
    desc = c.struct("td_account_model", case, **shape)
    parts = ("embedding", "attention", "ffn", "norms", "head", "total", "tensors")
    mine = fields(c.value("td_account_model_parameters", desc), *parts)
    flops = c.value("td_account_model_flops", desc, case.batch, case.context, False, False)
    mine |= {"forward_flops": flops.forward_matmul, "backward_flops": flops.backward_matmul}
    sizes = c.value("td_account_model_activations", desc, case.batch, case.context, 4)
    mine |= fields(sizes, "residual", "scores", "ffn", "logits") | {"ffn_parameters": mine["ffn"]}

    meta = ref.meta_model(*shape.values(), case.context)
    counted = ref.parameters(meta)
    theirs = {**counted, "ffn_parameters": counted["ffn"]}
    total = ref.flops_of_layers(**shape, batch=case.batch, context=case.context)
    theirs |= {"forward_flops": float(total["forward"]), "backward_flops": float(total["backward"])}
    heads = {name: shape[name] for name in ("d_model", "d_ff", "heads", "vocab")}
    theirs |= ref.activation_bytes(**heads, batch=case.batch, context=case.context)
    return sides(mine, theirs)


def attention(case, c):
    memory = c.value(
        "td_account_attention_memory", case.batch, case.seq, case.seq, case.head_dim, 4, 2, False
    )
    counted = ref.attention_saved_bytes(case.batch, case.seq, case.head_dim)
    return sides({"matrices": 2 * memory.matrix}, {"matrices": counted["matrices"]})


def ddp(case, c):
    parameters = c.value(
        "td_account_model_parameters", c.struct("td_account_model", case, **extents(case.size)[0])
    )
    size = 4.0 * parameters.total
    link = (case.bytes_per_second, case.seconds_per_call)
    best = c.value("td_account_ddp_optimum_find", size, *link)
    mine = fields(best, "buckets", "bucket_bytes", "seconds")
    more = {"gradients": size, "tensors": parameters.tensors}
    for name, buckets in (("one", 1.0), ("each", float(parameters.tensors))):
        more[name] = c.value("td_account_ddp_overhead", size, *link, buckets)
    return sides(mine, ref.ddp_optimum(size, *link), within(rel_l2=1e-3), **more)


def xxl(case, c):
    desc = c.struct("td_account_xxl", case)
    memory = c.value("td_account_xxl_memory_of", desc)
    mine = fields(memory, "parameters", "state_bytes", "saved_bytes_per_token")
    more = fields(memory, "devices_80gb", "devices_80gib")
    more["fsdp_devices"] = c.value("td_account_xxl_devices", desc, 95e9)
    mesh = c.value("td_account_mesh_batch_of", desc, c.struct("td_account_mesh", case, **MESH))
    names = "alpha fsdp_tokens fsdp_tokens_per_device tensor_d_ff tensor_met shared_wire_tokens"
    names += " shared_wire_tokens_per_device optimum_tokens_per_device"
    more |= fields(mesh, *names.split())
    return sides(mine, ref.xxl(case.d_model, case.d_ff, case.blocks), **more)


def ring(case, c):
    once, alternate = c.ffi.new("double *"), c.ffi.new("double *")
    c.td_account_ring_all_reduce(float(case.bytes), case.ranks, MESH["bytes_per_second"], once, alternate)
    mine = {"ring": once[0], "alternate": alternate[0]}
    return sides(mine, ref.ring(case.bytes, case.ranks, MESH["bytes_per_second"]), within(rel_l2=1e-12))


def parallel(case, c):
    desc = c.struct("td_account_parallel", case, **LAYER, **RATES)
    times = c.value("td_account_parallel_times_of", c.enum("td_account_strategy", case.strategy), desc)
    names = ("forward_compute", "backward_compute", "forward_comm", "backward_comm")
    limits = fields(times, "forward_devices", "backward_devices")
    theirs = ref.parallel_times(case.strategy, **LAYER, **RATES)
    return sides(fields(times, *names), theirs, within(rel_l2=1e-12), **limits)


def both_strategies(case, c):
    desc = c.struct("td_account_parallel", case, **LAYER, **RATES)
    overlapped, shared = c.ffi.new("double *"), c.ffi.new("double *")
    c.td_account_fsdp_tensor_devices(desc, overlapped, shared)
    mine = {"overlapped": overlapped[0], "shared": shared[0]}
    return sides(mine, ref.both_devices(**LAYER, **RATES), within(rel_l2=1e-12))


# What else the answers name.
SECTIONS = {"communication_accounting": MESH, "alternate_ring_all_reduce": RATES}
SECTIONS |= dict.fromkeys((*STRATEGIES.values(), "fsdp_tp_calcs"), LAYER | RATES)


def report(page, records):
    page.section("ddp_bucketed_benchmarking (b)")
    rows = valued(records.only("ddp_bucketed_benchmarking"))
    page.say(**dict(zip(("first", "second"), rows, strict=False)))
    for deliverable, more in SECTIONS.items():
        page.section(deliverable)
        for row in valued(records.only(deliverable)):
            page.say(**row | more)
    page.method()
