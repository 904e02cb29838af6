"""Block layouts: which (query block i, key block j) are visible, as values with set algebra.

`local(4) | global_(1)`, `strided(16) & ~local(1)`, `random(0.1, seed=0) - local(2)`: each layout is one predicate on
(i, j), for any grid of blocks; |, &, - and ~ combine predicates. Indices are absolute: query block i covers positions
[i * bq, (i + 1) * bq). Nothing of the size of the grid is stored, except in `explicit` layouts.
"""

from __future__ import annotations

import base64
import math
import operator
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from workbench.patterns.checks import Value, axes, describe, flag, number, unwritten, whole

FAR = 1 << 30  # more blocks than there ever are: longer distances are cut to it, so that they fit in int32
RULES = ("local", "global_", "strided", "hierarchical", "random")
OPERATORS = {"|": operator.or_, "&": operator.and_, "-": operator.sub, "~": operator.invert}


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Value):
    """A predicate on blocks.

    visible(h, i, j, grid): broadcastable integer tensors and grid = (rows, columns) of blocks -> bool
    per_head: whether it depends on the head
    of: what a combination combines; tensor: the blocks of an explicit layout
    """

    kind: str
    arguments: Mapping
    visible: Callable[[Tensor, Tensor, Tensor, tuple[int, int]], Tensor]
    per_head: bool = False
    of: tuple[Layout, ...] = ()
    tensor: Tensor | None = None

    def __post_init__(self):
        object.__setattr__(self, "arguments", MappingProxyType(self.arguments))

    def __or__(self, other):
        return _combine("|", self, other)

    def __and__(self, other):
        return _combine("&", self, other)

    def __sub__(self, other):
        return _combine("-", self, other)

    def __invert__(self):
        return Layout("~", {}, lambda *where: ~self.visible(*where), self.per_head, (self,))

    @property
    def by_spec(self) -> bool:
        """Whether a few numbers say all of it, by a rule that is written here."""
        return self.kind in RULES or len(self.of) > 0 and all(part.by_spec for part in self.of)

    @property
    def batch(self) -> int | None:
        """The batch size of an explicit (B, H, rows, cols) layout, None for all others."""
        if self.tensor is not None:
            return len(self.tensor) if self.tensor.ndim == 4 else None
        return next((part.batch for part in self.of if part.batch is not None), None)

    def for_batch(self, b: int) -> Layout:
        """The layout of one batch entry; a layout without a batch is its own."""
        if self.batch is None:
            return self
        if self.tensor is not None:
            return _explicit(self.tensor[b], **self.arguments)
        return OPERATORS[self.kind](*(part.for_batch(b) for part in self.of))

    def check(self, heads: int, grid: tuple[int, int]) -> None:
        """Raise ValueError where an explicit tensor is not of these heads and blocks."""
        for part in self.of:
            part.check(heads, grid)
        if self.tensor is None:
            return
        shape = tuple(unwritten("the layout's tensor", self.tensor).shape)
        if shape[-2:] != grid:
            raise ValueError(f"layout of shape {shape}: its last two dimensions are {shape[-2:]}, want {grid} blocks")
        if len(shape) > 2 and shape[-3] not in (1, heads):
            raise ValueError(f"layout of shape {shape}: it has {shape[-3]} heads, want {heads}")

    def spec(self) -> dict:
        """JSON-able; `from_spec` is its inverse."""
        if self.of:
            return {"layout": self.kind, "of": [part.spec() for part in self.of]}
        packed = {} if self.tensor is None else {"blocks": pack(self.tensor)}
        return {"layout": self.kind, **self.arguments, **packed}

    @property
    def name(self) -> str:
        """Short, for tables: local-4+global-1+strided-16, random-0.90 (the sparsity)."""
        if self.kind == "~":
            return f"~{self.of[0]._inner}"
        if self.kind == "|":
            return "+".join(part.name if part.kind == "|" else part._inner for part in self.of)
        if self.of:
            return self.kind.join(part._inner for part in self.of)
        if self.kind == "random":
            seed, unlike = self.arguments["seed"], "-per-head" * self.arguments["per_head"]
            return f"random-{_short(1 - self.arguments['density'])}" + f"-seed-{seed}" * (seed > 0) + unlike
        if self.kind == "explicit":
            name = self.arguments["name"]
            return name if name != "explicit" else f"explicit-{zlib.crc32(repr(pack(self.tensor)).encode()):08x}"
        return "-".join([self.kind.rstrip("_"), *map(str, self.arguments.values())])

    @property
    def _inner(self) -> str:
        return f"({self.name})" if len(self.of) > 1 else self.name

    def __repr__(self):
        if self.tensor is not None:
            return f"<layout {self.name} of {tuple(self.tensor.shape)}>"
        parts = [f"({part!r})" if len(part.of) > 1 else repr(part) for part in self.of]
        if parts:
            return f"~{parts[0]}" if self.kind == "~" else f" {self.kind} ".join(parts)
        return f"layouts.{self.kind}({', '.join(f'{k}={v!r}' for k, v in self.arguments.items())})"

    def __reduce__(self):  # predicates are closures: pickled and copied by their spec
        return from_spec, (self.spec(),)


def _combine(kind, left, right) -> Layout:
    if not isinstance(right, Layout):
        return NotImplemented
    if left.batch is not None and right.batch is not None and left.batch != right.batch:
        raise ValueError(f"layouts of batch {left.batch} and {right.batch}: want one batch size")

    def visible(*where):
        one, other = left.visible(*where), right.visible(*where)
        return one | other if kind == "|" else one & (other if kind == "&" else ~other)

    return Layout(kind, {}, visible, left.per_head or right.per_head, (left, right))


def from_spec(spec: dict) -> Layout:
    """The layout that `Layout.spec` describes."""
    spec = dict(spec)
    kind = spec.pop("layout", None)
    if kind in OPERATORS:
        return OPERATORS[kind](*map(from_spec, spec["of"]))
    if kind == "explicit":
        return explicit(unpack(spec.pop("blocks", None)), **spec)
    if kind not in RULES:
        raise ValueError(f"layout={kind!r}: want one of {', '.join([*RULES, 'explicit', *OPERATORS])}")
    return globals()[kind](**spec)


def local(k: int) -> Layout:
    """|i - j| <= k"""
    k = whole("k", k, 0)
    return Layout("local", {"k": k}, lambda h, i, j, grid: (i - j).abs() <= min(k, FAR))


def global_(k: int) -> Layout:
    """i < k or j < k"""
    k = whole("k", k, 0)
    return Layout("global_", {"k": k}, lambda h, i, j, grid: (i < min(k, FAR)) | (j < min(k, FAR)))


def strided(s: int) -> Layout:
    """i = j (mod s)"""
    s = whole("s", s, 1)
    return Layout("strided", {"s": s}, lambda h, i, j, grid: i % min(s, FAR) == j % min(s, FAR))


def hierarchical(window: int = 1, levels: int = 4) -> Layout:
    """|i - j| <= window * min(2 ** (levels - 1), the largest power of two that divides j)

    Level l (0 <= l < levels) holds the distances above window * 2 ** (l - 1) and up to window * 2 ** l (level 0: from
    0), and sees there one key block in 2 ** l: the levels are disjoint, and the farther, the sparser.
    """
    window, levels = whole("window", window, 1), whole("levels", levels, 1)
    if levels > 31:
        raise ValueError(f"levels={levels}: want 1 to 31")
    reach = min(window, FAR)

    def visible(h, i, j, grid):
        divisor = j.new_tensor(1 << (levels - 1))
        divisor = torch.where(j % divisor == 0, divisor, j & -j)
        return ((i - j).abs() + reach - 1) // reach <= divisor  # no product: int32 could overflow

    return Layout("hierarchical", {"window": window, "levels": levels}, visible)


def random(density: float, seed: int = 0, per_head: bool = False) -> Layout:
    """j is among (i + 1) * total // rows - i * total // rows key blocks drawn for row i without replacement

    total = max(rows, round(density * rows * cols)): at least one block a row, rows differ by at most one. The
    draw depends on (seed, i) alone, with per_head=True also on the head. `block_density` says what came of it.
    """
    density = number("density", density, most=1, want="a number in (0, 1], the share of blocks that is visible")
    seed, per_head = whole("seed", seed, 0), flag("per_head", per_head)

    def visible(h, i, j, grid):
        rows, cols = grid
        total = max(rows, round(density * rows * cols))
        if i.is_meta:  # traced without contents
            return (h + i + j) < 0
        lines, line = i.unique(return_inverse=True)
        heads, head = h.unique(return_inverse=True) if per_head else (h.new_zeros(1), h * 0)
        table = torch.zeros(len(heads), len(lines), cols, dtype=torch.bool, device="cpu")
        for of_head, head_id in zip(table, heads.tolist(), strict=True):
            for of_row, row in zip(of_head, lines.tolist(), strict=True):
                many = (row + 1) * total // rows - row * total // rows
                chosen = np.random.default_rng((seed, head_id, row)).choice(cols, many, replace=False, shuffle=False)
                of_row[torch.from_numpy(chosen)] = True
        return table.to(i.device)[head.long(), line, j.long()]

    arguments = {"density": density, "seed": seed, "per_head": per_head}
    return Layout("random", arguments, visible, per_head)


def explicit(blocks: Tensor, name: str = "explicit") -> Layout:
    """blocks[i, j], blocks[h, i, j] or blocks[b, h, i, j]

    blocks: bool (rows, cols), (H, rows, cols) or (B, H, rows, cols), rows = ceil(N / bq) and cols = ceil(N / bk), an H
    of 1 for all heads: rows are absolute, also where there are fewer queries than keys. They are copied.
    """
    fits = isinstance(blocks, Tensor) and blocks.dtype == torch.bool
    if not fits or not (blocks.ndim in (2, 3) or blocks.ndim == 4 and len(blocks)):
        want = "want a bool tensor (rows, cols), (H, rows, cols) or (B, H, rows, cols), B at least 1"
        raise ValueError(f"blocks={describe(blocks)}: {want}")
    if not isinstance(name, str):
        raise ValueError(f"name={name!r}: want a string")
    if blocks.is_meta:
        raise ValueError(f"blocks={describe(blocks)} on the meta device: want a tensor with contents")
    with torch.inference_mode(False):
        return _explicit(blocks.detach().clone().data, name)  # whose version is 0


def _explicit(blocks: Tensor, name: str) -> Layout:
    def visible(h, i, j, grid):
        if blocks.ndim == 4 and len(blocks) != 1:
            raise ValueError(f"layout of batch {len(blocks)}: index the batch, for_batch(b), first")
        table = blocks.to(i.device).view(blocks.shape[-3:])
        return table[h, i, j] if per_head else table.view(table.shape[-2:])[i, j]

    per_head = blocks.ndim > 2 and blocks.shape[-3] != 1
    return Layout("explicit", {"name": name}, visible, per_head, (), blocks)


@torch.no_grad()
def top_k(q: Tensor, k: Tensor, block_size, count: int) -> Layout:
    """j is among the `count` key blocks of the largest mean(q of block i) . mean(k of block j), per batch and head

    q (B, Nq, H, D), k (B, N, Hkv, D) with Hkv dividing H, queries the last Nq positions. The result is explicit:
    (B, H, rows, cols).
    """
    bq, bk = axes("block_size", block_size, 2, 1)
    count = whole("count", count, 1)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        raise ValueError(f"q={describe(q)}, k={describe(k)}: want tensors")
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: want (B, Nq, H, D) and (B, N, Hkv, D)")
    n, nq = k.shape[1], q.shape[1]
    if nq > n or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: want Nq <= N and Hkv dividing H")
    rows, cols, first = -(-n // bq), -(-n // bk), (n - nq) // bq
    if count > cols:
        raise ValueError(f"count={count}: want at most the {cols} key blocks of {bk} there are in {n} keys")
    queries = _pool(q, bq, n - nq - first * bq)  # (B, rows with queries, H, D)
    keys = _pool(k, bk, 0).repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", queries, keys)
    best = scores.topk(count, dim=-1).indices
    blocks = torch.zeros(q.shape[0], q.shape[2], rows, cols, dtype=torch.bool, device=q.device)
    blocks[:, :, first : first + scores.shape[2]].scatter_(3, best, True)
    return explicit(blocks, name=f"top-k-{count}")


def _pool(states: Tensor, block: int, skip: int) -> Tensor:
    """(B, N, H, D) -> (B, blocks, H, D): the mean of each block, where the first block lacks its first `skip` rows."""
    size = states.shape[1]
    blocks = -(-(size + skip) // block) if size else 0
    where = (torch.arange(size, device=states.device) + skip) // block
    wide = states.double() if states.dtype == torch.float64 else states.float()
    total = wide.new_zeros(states.shape[0], blocks, *states.shape[2:]).index_add_(1, where, wide)
    return total / torch.bincount(where, minlength=blocks).clamp(min=1)[:, None, None]


def pack(tensor: Tensor) -> dict:
    """A bool tensor as JSON-able data."""
    text = base64.b64encode(zlib.compress(np.packbits(tensor.cpu().numpy()).tobytes(), 9)).decode()
    return {"dtype": "bool", "shape": list(tensor.shape), "zlib": text}


def unpack(packed: dict) -> Tensor:
    if not isinstance(packed, dict) or not packed.keys() >= {"zlib", "shape"}:
        raise ValueError(f"blocks={packed!r}: want what `pack` makes of a bool tensor")
    data, shape = zlib.decompress(base64.b64decode(packed["zlib"])), tuple(packed["shape"])
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=math.prod(shape))
    return torch.from_numpy(bits.astype(bool)).view(shape)


def _short(share: float) -> str:
    """Two decimals, more where two do not say it."""
    return f"{share:.2f}" if abs(round(share, 2) - share) < 1e-9 else f"{share:.10g}"
