"""What the tests run on every rank: functions of (rank, world, ...) that return plain data."""

import contextlib
import gc
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests import tools
from tests.distributed import races
from tests.distributed.cases import CASES
from tests.tools import Case
from workbench import BlockSparse, Dense, Dilated, Neighborhood, VirtualCard, layouts
from workbench.distributed import Plan, Shards, api, buffers, call, exchange, plans
from workbench.distributed.call import plans_of
from workbench.distributed.sequence import Executor
from workbench.distributed.shards import clip
from workbench.engines.torch import fused
from workbench.patterns import orderings

TOLERANCE = 1e-12

# --- one case on one rank ---------------------------------------------------------------------------------------------


def rows_of(case: Case, lengths, rank: int) -> tuple[slice, slice]:
    """(rows of q, rows of k) of a rank."""
    own = Shards(tuple(lengths))[rank]
    first = case.n - (case.n if case.nq is None else case.nq)
    queries = clip(range(first, case.n), own.start, max(own.stop, first))
    return slice(queries.start - first, queries.stop - first), slice(own.start, own.stop)


def shard(inputs, rows):
    q, k, v, g, gl = inputs
    of_q, of_k = rows
    return q[:, of_q], k[:, of_k], v[:, of_k], g[:, of_q], gl[:, :, of_q]


def part(name: str, x, rows):
    of_q, of_k = rows
    return x[:, :, of_q] if name == "lse" else x[:, of_q if name in ("out", "dq") else of_k]


def mine_of(pattern, rank, world, dtype=torch.float64, n=64, **sizes) -> list[torch.Tensor]:
    """A rank's q, k, v and upstream gradients of a case in even shards."""
    case = Case("", lambda: pattern, n, **sizes)
    return shard(case.inputs(dtype), rows_of(case, [n // world] * world, rank))


def raised(call, *given, **options) -> tuple[str, str] | None:
    """(kind of error, its text) of what a call raises."""
    try:
        call(*given, **options)
    except Exception as error:
        return type(error).__name__, str(error)


def run(pattern, strategy="sequence", **options):
    return lambda q, k, v, p: api.attention(q, k, v, pattern, strategy=strategy, return_lse=True, **options)


def by_kernels(rank, world, id, name):
    """The largest error of this rank, by our kernels in Triton's interpreter."""
    case, shards = CASES[id]
    from workbench.engines import triton_backend
    from workbench.engines.triton import tile_ops  # noqa: F401 (who tells that they are interpreted)

    assert triton_backend.interpreted()
    return max(compare(rank, case, shards[world], dtype=getattr(torch, name), backend="triton").values())


def compare(rank, case, lengths, strategy="sequence", dtype=torch.float64, **options) -> dict[str, float]:
    """Of out, lse, dq, dk, dv: ||error|| over the larger of ||want|| and ||upstream|| of this rank's rows."""
    pattern, inputs, rows = case.pattern(), case.inputs(dtype), rows_of(case, lengths, rank)
    want = tools.oracle(inputs, pattern)
    mine = shard(inputs, rows)
    with tools.poisoned():
        got = tools.differentiate(run(pattern, strategy, **options), mine, pattern)
    found = {}
    for name, x in got.items():
        right = part(name, want[name], rows)
        assert x.shape == right.shape, f"{name} is {tuple(x.shape)}, not {tuple(right.shape)}"
        assert x.dtype == (mine[4].dtype if name == "lse" else dtype)
        assert name == "lse" or bool(x.isfinite().all()), f"{name} is not finite"
        if name == "lse":
            found[name] = tools.lse_error(x, right) if x.numel() else 0.0
        else:
            found[name] = tools.relative(x, right, None if name == "out" else inputs[3])
    return found


@contextlib.contextmanager
def counted(world: int):
    """Bytes that this rank hands to torch's all-to-all for each of the others, while it is in use."""
    sent, real = [0] * world, dist.all_to_all_single

    def count(target, source, into, out, **options):
        assert source.numel() == sum(out) and target.numel() == sum(into)
        assert not source.numel() or source.data_ptr() != target.data_ptr(), "one buffer for both"
        for rank, elements in enumerate(out):
            sent[rank] += elements * source.element_size() * (rank != dist.get_rank(options["group"]))
        return real(target, source, into, out, **options)

    with patch.object(dist, "all_to_all_single", count):
        yield sent


def exact(rank, world, id, strategy="sequence"):
    """(errors, bytes sent to each rank, bytes that the plan says) of forward and backward."""
    case, shards = CASES[id]
    lengths = shards[world] if world in shards else Shards.even(case.n, world).lengths
    with counted(world) as sent:
        found = compare(rank, case, lengths, strategy)
        plan = plan_of(case, lengths, strategy)
        planned = plan.bytes(8, case.head_dim, case.batch, "fwdbwd", lse=True)[rank].tolist()
    return found, sent, planned


def in_one_stage(rank, world, id):
    """`exact` with the package's own sizes of stages, by which short sequences take one."""
    assert len(plan_of(CASES[id][0], CASES[id][1][world]).stages) > 1
    with patch.object(plans, "LEAST", 1 << 14), patch.object(plans, "DENSE", 1 << 14):
        assert len(plan_of(CASES[id][0], CASES[id][1][world]).stages) == 1
        return exact(rank, world, id)


def plan_of(case, lengths, strategy="sequence") -> Plan:
    sizes = (case.pattern(), Shards(tuple(lengths)), case.heads, case.kv_heads or case.heads)
    nq = case.n if case.nq is None else case.nq
    return call.choose(strategy, (*sizes, nq), 8, case.head_dim)


def _swapped(patch_):
    add = exchange.Exchange.add
    patch_(exchange.Exchange, "add", lambda self, stage, arrived, dk, dv: add(self, stage, arrived, dv, dk))


def _hop_dropped(patch_):
    real = exchange.Exchange.group_cast

    def group_cast(self, stage, sent, received):
        pending = real(self, stage, sent, received)
        pending.wait()
        neighbour = self.slots[stage][1][(self.ranks.rank - 1) % self.plan.world]
        for slot in neighbour:
            self.rows(received, slot.block).zero_()
        return pending

    patch_(exchange.Exchange, "group_cast", group_cast)


def _return_dropped(patch_):
    real = exchange.Exchange.add

    def add(self, stage, arrived, dk, dv):
        for slot in self.slots[stage][0][(self.ranks.rank + 1) % self.plan.world]:
            self.rows(arrived, slot.block).zero_()
        real(self, stage, arrived, dk, dv)

    patch_(exchange.Exchange, "add", add)


def _stale_buffer(patch_):
    patch_(torch.Tensor, "zero_", lambda self: self)


def _keys_and_values_swapped(patch_):
    real = exchange.Exchange.pack
    patch_(exchange.Exchange, "pack", lambda self, stage, k, v, sent: real(self, stage, v, k, sent))


def _border_kept(patch_):
    patch_(buffers.Placed, "overwrite", lambda self, x, part: None)


def _border_twice(patch_):
    patch_(torch.Tensor, "index_fill", lambda self, *_: self)


MUTANTS = {
    "dk-and-dv-swapped": _swapped, "a-hop-dropped": _hop_dropped, "a-returned-gradient-dropped": _return_dropped,
    "gradients-added-to-what-was-there": _stale_buffer, "keys-and-values-swapped": _keys_and_values_swapped,
    "results-at-the-border-not-replaced": _border_kept,
    "gradients-at-the-border-given-twice": _border_twice,
}  # fmt: skip


def mutated(rank, world, name, id):
    """The largest error of this rank with something broken; inf if a result is not finite."""
    case, shards = CASES[id]
    with contextlib.ExitStack() as stack:
        MUTANTS[name](lambda *where: stack.enter_context(patch.object(*where)))
        try:
            return max(compare(rank, case, shards[world]).values())
        except AssertionError as error:
            if "not finite" in str(error):
                return torch.inf
            raise


def on_streams(rank, world, id, forgets=None, hastens=None, by_host=False):
    """(errors, races) of three calls, of which the last two begin before ranks have agreed.

    forgets: a rank that loses its plan before the last call; hastens: which wait is left out; by_host: see `races`
    """
    case, shards = CASES[id]
    pattern, inputs, rows = case.pattern(), case.inputs(torch.float64), rows_of(case, shards[world], rank)
    want, mine = tools.oracle(inputs, pattern), shard(inputs, rows)
    mutants = {"what is there": (races.Point, "wait"), "what arrives": (races.Transfer, "wait")}
    errors = []
    with races.Races(by_host) as found, contextlib.ExitStack() as stack:
        if hastens:
            stack.enter_context(patch.object(*mutants[hastens], lambda *_: None))
        for time in range(3):
            if time == 2 and rank == forgets:
                plans_of(pattern).clear()
            got = tools.differentiate(run(pattern, group=found.ranks), mine, pattern)
            errors += [float((x - part(name, want[name], rows)).abs().max()) for name, x in got.items()]
            del got
    return errors, sorted(found.found)


def whole_errors(rank, case, lengths, dtype, strategy="sequence", device="cpu") -> dict[str, tuple[float, float]]:
    """(error, what is allowed) of out, lse, dq, dk and dv, put together from all ranks, without a gradient of lse."""
    pattern, inputs = case.pattern(), case.inputs(dtype, device)
    inputs[4].zero_()
    want, rows = tools.oracle(inputs, pattern), rows_of(case, lengths, rank)
    with tools.poisoned(device):
        got = tools.differentiate(tools.without_lse(run(pattern, strategy)), shard(inputs, rows), pattern)
    budget, found = tools.budgets(pattern, inputs, want), {}
    for name, x in got.items():
        whole = torch.zeros(want[name].shape, dtype=torch.float64, device=device)
        part(name, whole, rows).copy_(x)
        dist.all_reduce(whole)
        upstream = None if name == "out" else inputs[3]
        error = tools.lse_error(whole, want[name]) if name == "lse" else tools.relative(whole, want[name], upstream)
        found[name] = error, budget[name]
    return found


def dtype_errors(rank, world, name, lengths):
    """`whole_errors` by pattern."""
    patterns = Dilated([64, 24], [2, 1]), Dense(True), BlockSparse(layouts.strided(2), 8)
    cases = [Case("", lambda p=x: p, 64, heads=4, kv_heads=2, head_dim=16) for x in patterns]
    return [whole_errors(rank, case, lengths, getattr(torch, name)) for case in cases]


def living_bytes(rank, world, times):
    """(bytes of tensors alive after 1 + `times` iterations, the most inside the last one)."""
    patterns = [Dilated([64, 24], [2, 1]), Dense(True), BlockSparse(layouts.local(1), 8)]
    mine = mine_of(None, rank, world, torch.float32)
    seen, real = [], exchange.Exchange.add

    def add(*x):
        seen.append(alive())
        real(*x)

    for time in range(times + 1):  # the first one also makes the plans
        last = time == times
        with patch.object(exchange.Exchange, "add", add) if last else contextlib.nullcontext():
            for pattern in patterns:
                tools.differentiate(run(pattern), mine, pattern)
    gc.collect()
    return alive(), max(seen)


def alive() -> int:
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


FAILS = {  # what raises on the last rank, and what it raises
    "out of memory": (Executor, "allocate", torch.OutOfMemoryError("no room for 3 GB")),
    "bug": (Executor, "allocate", KeyError("lost")),
    "out of memory by heads": (torch.Tensor, "new_empty", torch.OutOfMemoryError("no room")),
}


def refused(rank, world, what):
    """(kind of error, its text) that this rank got, before any row was sent; afterwards a correct call has to work."""
    pattern, last = Dilated([64], [2]), rank == world - 1
    q, k, v, *_ = mine_of(pattern, rank, world, heads=4)

    def each(change):
        return {name: change(x) for name, x in zip("qkv", (q, k, v), strict=True)}

    on_all = {
        "ordering": {"pattern": Neighborhood((8, 8), 1, orderings.random((8, 8), int(last)))},
        "strategy": {"strategy": "ring"},
        "heads": each(lambda x: x[:, :, :3]) | {"strategy": "heads"},
        "lengths": {"lengths": [3]},
        "softcap": {"softcap": 20},
        "tokens": {"pattern": Neighborhood((9, 9), 1)},
        "out of memory by heads": {"strategy": "heads"},
    }
    on_last = {
        "pattern": {"pattern": Dilated([64], [2], causal=True)},
        "dtype": each(torch.Tensor.float),
        "shape": each(lambda x: x[..., :4]),
        "scale": {"scale": 0.5},
        "queries": {"q": q[:, 1:]},
        "v": {"v": v[:, 1:]},
        "device": each(lambda x: x.to("meta")),
        "requires_grad": {"q": q.clone().requires_grad_()},
    }
    call = {"q": q, "k": k, "v": v, "pattern": pattern} | on_all.get(what, {})
    call |= on_last.get(what, {}) if last else {}
    fails = patch.object(*FAILS[what][:2], side_effect=FAILS[what][2]) if what in FAILS and last else None
    with fails or contextlib.nullcontext(), counted(world) as sent:
        found = raised(api.attention, **call)
    assert sum(sent) == 0, "data moved before the refusal"
    case = CASES["geometric"]
    assert max(compare(rank, case[0], case[1][world]).values()) < TOLERANCE
    return found


def peak(rank, world, case, strategy) -> int:
    """Requested bytes at the peak of this rank's share of a case, on a virtual card without fused attention."""
    rows, backward, found = len(Shards.even(case.n, world)[rank]), case.mode == "fwdbwd", []
    for _ in range(3):  # the first time makes the plan, which is no tensor of a card
        with VirtualCard(8) as card, patch.object(fused, "kernel", lambda q, mask=None: "unfused"):
            indices = [x.view(-1) for x in on_card(case.pattern)]
            heads = case.heads, case.kv_heads, case.kv_heads
            q, k, v = (torch.randn(case.batch, rows, h, case.head_dim, requires_grad=backward) for h in heads)
            upstream = torch.randn(q.shape) if backward else None
            out = api.attention(q, k, v, case.pattern, strategy=strategy, backend="torch")
            if backward:
                out = torch.autograd.grad(out, (q, k, v), upstream)
        del out, indices
        found.append(card.peak_requested_bytes)
    return min(found[1:])  # a thread of gloo's may hold what it has sent for a little longer


def on_card(pattern):
    """The index tensors that a plan made ready keeps on the card."""
    for executor in (x for x in plans_of(pattern).values() if isinstance(x, Executor)):
        every = executor.every
        copies = [*(placed.copies for placed in every), *executor.exchange.copies.values()]
        copied = [view.rows for some in copies for copy in some for view in (copy.source, copy.target)]
        queries = [x for placed in every for x in (placed.border_rows, placed.overwritten)]
        yield from (x for x in (*copied, *queries) if isinstance(x, torch.Tensor))
