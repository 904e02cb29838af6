"""Whether a call that fits is also right: sampled rows of its results against float64, at any length.

A row of out and dq comes from the keys that it sees, a row of dk and dv from the queries that see the key, gathered a
few at a time: never N x N, and no copy of an input. A kernel that is right at a thousand tokens may still be wrong
where an offset no longer fits in 32 bits, so rows are sampled on both sides of those places.

An error is ||got - want|| over the size of what was summed: ||want|| plus the root of the sum of the squares of the
terms. Rounding is proportional to that, however much the terms cancel, and a row of zeros where something should be is
far from it. Allowed is, for float64 and float32, what the tests against the oracle allow; for 16 bits twice what those
must round (the weights before they are multiplied, and the result), four times half a last bit.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads (G divides H), D
head_dim; m rows and M keys of one head at a time. i and j are absolute positions of a query and a key.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engines import dispatch
from workbench.engines.torch.fused import GRID
from workbench.patterns import Pattern
from workbench.probes.error import LSE, RELATIVE
from workbench.probes.visible import CHUNK, cut, parts, queries, tensor

ELEMENTS = (1 << 31, 1 << 32)  # where an element's offset stops to fit in an int32, and in a uint32
RANDOM = 8  # rows between two such places
ROWS = 1 << 12  # queries whose softmaxes are computed at once
PAIRS = {"cuda": 1 << 33, "cpu": 1 << 28}  # (query, key) pairs for the softmaxes behind dk and dv: some seconds


@dataclass(frozen=True)
class Validity:
    """What a check found.

    errors, allowed: by quantity (out, lse, dq, dk, dv), the largest error over the sampled rows and what it may be
    wrong: a sentence for each row with more, the worst first
    rows, keys: how many rows of out and dq, of dk and dv were compared
    note: what was not checked, or None
    unchecked: of what was given, the quantities of which not a row was compared though they have some
    ok: nothing is wrong, and of everything that was given something was compared
    """

    errors: dict[str, float]
    allowed: dict[str, float]
    wrong: tuple[str, ...]
    rows: int
    keys: int
    note: str | None
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.unchecked

    def __str__(self) -> str:
        counts = ((self.rows, "row"), (self.keys, "key"))
        of = " and ".join(f"{count} {what}{'s' * (count != 1)}" for count, what in counts if count) or "nothing"
        of += f" ({self.note})" if self.note else ""
        if not self.wrong:
            right = f"right at {of}"
            return f"{' and '.join(self.unchecked)} not checked; {right}" if self.unchecked else right
        more = f", and {len(self.wrong) - 1} more" if len(self.wrong) > 1 else ""
        return f"wrong: {self.wrong[0]}{more}; compared {of}"


@torch.no_grad()
def check(
    pattern: Pattern, returned: Mapping[str, Tensor], inputs: Sequence[Tensor], *,
    rows: Iterable[tuple[int, int, int]] | None = None, keys: Iterable[tuple[int, int, int]] | None = None,
    pairs: int | None = None,
) -> Validity:  # fmt: skip
    """Compare what a call of attention returned with float64, at sampled rows.

    pattern: what was computed
    returned: by name, what there is of out (B, Nq, H, D), lse (B, H, Nq) and dq, dk, dv of sum(out * upstream)
    inputs: q (B, Nq, H, D), k and v (B, N, G, D) and, for gradients, the upstream one, like q
    rows: (batch entry, row of q, head), and keys: (batch entry, row of k, key head); default `sample`'s
    pairs: of (query, key), how many may be computed for the softmaxes of the queries that see a sampled key. A key that
        needs more is left out, as `note` says.
    """
    q, k, v, *upstream = inputs
    dispatch.check(q, k, v, pattern)
    given = _given(returned, q, k, upstream)
    exact, shift = Exact(pattern, q, k, v, *(upstream if "dq" in given else ())), k.shape[1] - q.shape[1]
    measured = []  # (name, place, error)
    rows = list(sample(q.shape, pattern, shift) if rows is None else rows)
    for b, i, h in rows:
        found = exact.rows(b, h, torch.tensor([i + shift]))
        for name in given.keys() & found.keys():
            at = (b, h, i) if name == "lse" else (b, i, h)
            measured.append((name, at, _error(given[name][at], *(x[0] for x in found[name]))))
    keys = [] if "dq" not in given else list(sample(k.shape, pattern, 0, seed=1) if keys is None else keys)
    left, done = PAIRS.get(k.device.type, PAIRS["cpu"]) if pairs is None else pairs, 0
    for b, j, g in keys:
        spent = exact.pairs(b, g, j, left)
        if spent <= left:
            done, left = done + 1, left - spent
            for name, found in exact.key(b, g, j).items():
                measured.append((name, (b, j, g), _error(given[name][b, j, g], *found)))
    more = f"{len(keys) - done} keys left out: the softmaxes of their queries are too many pairs"
    return _report(given, q.dtype, measured, len(rows), done, more if done < len(keys) else None)


def _report(given: Mapping[str, Tensor], dtype: torch.dtype, measured: list, *counts) -> Validity:
    allowed = dict.fromkeys(given, RELATIVE.get(dtype, 2 * torch.finfo(dtype).eps)) | {"lse": LSE[dtype]}
    errors = {x: max(error for name, _, error in measured if name == x) for x in dict.fromkeys(x[0] for x in measured)}
    over = sorted((x for x in measured if x[2] > allowed[x[0]]), key=lambda x: -x[2])
    wrong = tuple(f"{_where(name, at, given[name])} is off by {error:.3g} of its size, more than {allowed[name]:.3g}"
                  for name, at, error in over)  # fmt: skip
    unchecked = tuple(name for name, x in given.items() if x.numel() and name not in errors)
    return Validity(errors, {name: allowed[name] for name in errors}, wrong, *counts, unchecked)


def _error(got: Tensor, want: Tensor, size: Tensor) -> float:
    """Of a row (D) or an lse () beside what it should be, relative to size ()."""
    least = torch.finfo(got.dtype).smallest_normal * math.sqrt(max(1, want.numel()))
    difference = torch.where(got == want, 0.0, got.double() - want).norm()  # -inf is -inf
    return float(difference / size.clamp(min=least)) if bool(difference.isfinite()) else math.inf


def _where(name: str, at: tuple[int, int, int], x: Tensor) -> str:
    b, row, head = (at[0], at[2], at[1]) if name == "lse" else at
    steps = torch.empty(x.shape, device="meta").stride()  # of a contiguous tensor
    element = sum(place * step for place, step in zip(at, steps, strict=False))
    return f"{name} of sequence {b:,}, row {row:,}, head {head:,} (from element {element:,} on)"


def _given(returned: Mapping[str, Tensor], q: Tensor, k: Tensor, upstream: Sequence[Tensor]) -> dict[str, Tensor]:
    """What was returned, without its history; ValueError where it is not results of such inputs."""
    shapes = {"out": q.shape, "lse": (len(q), q.shape[2], q.shape[1]), "dq": q.shape, "dk": k.shape, "dv": k.shape}
    if not isinstance(returned, Mapping) or not returned or not returned.keys() <= shapes.keys():
        raise ValueError(f"returned={list(returned)}: nothing to check; want a dictionary of {', '.join(shapes)}")
    for name, x in returned.items():
        if x.shape != torch.Size(shapes[name]):
            raise ValueError(f"{name} of shape {tuple(x.shape)}: want {tuple(shapes[name])}")
    gradients = returned.keys() & {"dq", "dk", "dv"}
    if gradients and (len(gradients) != 3 or [x.shape for x in upstream] != [q.shape]):
        raise ValueError("gradients: want dq, dk and dv, and as the fourth input the upstream gradient of out, like q")
    return {name: returned[name].detach() for name in shapes if name in returned}


def sample(shape: tuple[int, ...], pattern, shift: int = 0, seed: int = 0) -> list[tuple[int, int, int]]:
    """(batch entry, row, head) of rows of a contiguous tensor (B, L, H, D), the most telling first.

    Both sides of 2^31 and 2^32 elements and of 65,535 (sequence, head) pairs, the last and the first row, both sides of
    the edges of segments and blocks, and random ones between those places. shift: the position of row 0.
    """
    b, length, heads, d = shape
    total = b * length * heads
    if not total:
        return []
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high, (), generator=random))

    places = [x // d for x in ELEMENTS if x // d < total]  # as rows of (B * L * H, D)
    flat = [y for x in places for y in (x, x - 1)] + [total - 1, 0]
    found = [(x // heads // length, x // heads % length, x % heads) for x in flat]
    found += [(x // heads, draw(0, length), x % heads) for x in (GRID, GRID - 1) if b * heads > GRID]
    found += [(draw(0, b), x - shift, draw(0, heads)) for x in edges(pattern, length + shift) if x >= shift]
    order = torch.randperm(heads, generator=random).tolist()
    for low, high in zip([0, *places], [*places, total], strict=True):
        for turn in range(RANDOM if high > low else 0):
            x = draw(low, high) // heads
            found.append((x // length, x % length, order[turn % heads]))
    return list(dict.fromkeys(found))


def edges(pattern, n: int) -> list[int]:
    """Positions on both sides of the first and of the last edge between segments (or blocks) of each length."""
    lengths = {*getattr(pattern, "segment_lengths", ()), *getattr(pattern, "block_size", ())}
    return sorted({x for w in lengths if w < n for edge in (w, (n - 1) // w * w) for x in (edge - 1, edge)})


class Exact:
    """Rows of a call's results in float64, from its inputs; with `upstream`, of the gradients of sum(out * upstream).

    Each is (value (m, D) or (D), size (m) or ()): what an error is relative to.
    """

    def __init__(self, pattern, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor | None = None):
        self.pattern, self.q, self.k, self.v, self.upstream = pattern, q, k, v, upstream
        self.scale = 1 / math.sqrt(q.shape[3])
        self.n, self.heads, self.group = k.shape[1], q.shape[2], q.shape[2] // max(1, k.shape[2])
        self.shift = k.shape[1] - q.shape[1]
        self.divisor = pattern.divisor(self.heads)
        self.device = q.device

    def take(self, x: Tensor, b: int, at: range | Tensor, h: int) -> Tensor:
        """float64 (m, D)."""
        x = x[b, :, h]
        x = x[at.start : at.stop : at.step] if isinstance(at, range) else x[at.to(self.device)]
        return x.double()

    def scores(self, b: int, h: int, i: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield (rows (m), scores (m, M) with the log of how often, k (M, D), v (M, D)): some rows and keys at once."""
        q = self.take(self.q, b, i - self.shift, h)
        for part in parts(self.pattern.for_batch(b), h, i, self.n, self.heads):
            rows = part.rows.to(self.device)
            for keys in cut(part.keys, max(1, CHUNK // max(len(rows), q.shape[1], 1))):
                k, v = (self.take(x, b, keys, h // self.group) for x in (self.k, self.v))
                s = q[rows] @ k.T * self.scale
                if part.seen is not None:
                    i_, j = i[part.rows].to(self.device), tensor(keys).to(self.device)
                    s += part.seen(i_[:, None], j[None]).to(self.device).double().log()
                yield rows, s, k, v

    def rows(self, b: int, h: int, i: Tensor, gradient: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """out, lse and, with an upstream gradient and if it is wanted, dq of rows i (m)."""
        m, d = len(i), self.q.shape[3]
        new = lambda *shape: torch.zeros(shape, dtype=torch.float64, device=self.device)  # noqa: E731
        lse = new(m) - torch.inf
        for rows, s, _, _ in self.scores(b, h, i):
            lse[rows] = torch.logaddexp(lse[rows], s.logsumexp(1))
        norm = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has no weights
        gradient = gradient and self.upstream is not None
        do = self.take(self.upstream, b, i - self.shift, h) / self.divisor if gradient else None
        out, out_2, mean, key_2, grad, grad_2 = new(m, d), new(m), new(m, d), new(m), new(m, d), new(m)
        for rows, s, k, v in self.scores(b, h, i):
            p = torch.exp(s - norm[rows, None])
            p_2 = p.square()
            out[rows] += p @ v
            out_2[rows] += p_2 @ _square(v)
            if do is not None:  # dq = scale * sum p (do.v - do.out) k: the second term once the row's out is known
                dp, its_2 = do[rows] @ v.T, do[rows].square() @ v.square().T
                mean[rows] += p @ k
                key_2[rows] += p_2 @ _square(k)
                grad[rows] += (p * dp) @ k
                grad_2[rows] += (p_2 * (dp.square() + its_2)) @ _square(k)
        found = {
            "out": (out / self.divisor, (out.norm(dim=1) + out_2.sqrt()) / self.divisor),
            "lse": (lse, lse.masked_fill(lse == -torch.inf, 1).abs().clamp(min=1)),
        }
        if do is not None:
            delta, its_2 = (do * out).sum(1), _square(do * out)
            dq = (grad - delta[:, None] * mean) * self.scale
            terms = (grad_2 + (delta.square() + its_2) * key_2).sqrt() + its_2.sqrt() * mean.norm(dim=1)
            found["dq"] = dq, dq.norm(dim=1) + terms * self.scale
        return found

    def pairs(self, b: int, g: int, j: int, most: int) -> int:
        """The (query, key) pairs of the softmaxes of all queries that see a key; counting stops above `most`."""
        total, pattern = 0, self.pattern.for_batch(b)
        for h in range(g * self.group, (g + 1) * self.group):
            for i in queries(pattern, h, j, self.n, self.heads, self.n - self.shift, ROWS):
                total += sum(len(part.rows) * len(part.keys) for part in parts(pattern, h, i, self.n, self.heads))
                if total > most:
                    return total
        return total

    def key(self, b: int, g: int, j: int) -> dict[str, tuple[Tensor, Tensor]]:
        """dk and dv of a key."""
        k, v = (self.take(x, b, range(j, j + 1), g)[0] for x in (self.k, self.v))
        dk, dv, dk_2, dv_2 = k * 0, v * 0, k.new_zeros(()), v.new_zeros(())
        pattern = self.pattern.for_batch(b)
        for h in range(g * self.group, (g + 1) * self.group):
            for i in queries(pattern, h, j, self.n, self.heads, self.n - self.shift, ROWS):
                at = i - self.shift
                found = self.rows(b, h, i, gradient=False)
                out, lse = found["out"][0] * self.divisor, found["lse"][0]
                q, do = self.take(self.q, b, at, h), self.take(self.upstream, b, at, h) / self.divisor
                p = torch.exp(q @ k * self.scale - lse)
                ds = p * (do @ v - (do * out).sum(1))
                rounded = p.square() * (_square(do * v) + _square(do * out))
                dk += ds @ q * self.scale
                dv += p @ do
                dk_2 += (ds.square() + rounded) @ _square(q) * self.scale**2
                dv_2 += p.square() @ _square(do)
        return {"dk": (dk, dk.norm() + dk_2.sqrt()), "dv": (dv, dv.norm() + dv_2.sqrt())}


def _square(x: Tensor) -> Tensor:
    """The squared length of each row."""
    return x.square().sum(1)
