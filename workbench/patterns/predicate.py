"""A pattern written by its user, as a function of (head, query, key)."""

import inspect
import textwrap

import torch
from torch import Tensor

from workbench.patterns.checks import flag
from workbench.patterns.frozen import frozen
from workbench.patterns.listed import Looked


class Predicate(Looked):
    """visible(h, i, j) = fn(h, i, j), and j <= i if causal.

    fn takes broadcastable int64 tensors (head, query, key: absolute positions) and returns a bool tensor that
    broadcasts with them. It is evaluated in tiles: N^2 work, bounded memory, progress on stderr where it takes long.
    It answers as it does when the pattern is made: what it reads is copied then (`patterns.frozen`).
    Its repr names fn and does not evaluate; pickle takes only an fn defined with def in a module, copies take any.
    """

    def __init__(self, fn, causal: bool = False):
        if not callable(fn):
            raise ValueError(f"fn={fn!r}: want a function of (h, i, j)")
        self.fn = fn
        if not torch.compiler.is_compiling():  # which makes no functions: it is copied when it is asked
            self.asked = frozen(fn)
        self.causal = flag("causal", causal)

    def __getstate__(self):  # the copy of a function has no name in a module, by which pickle could find it
        return {k: v for k, v in super().__getstate__().items() if k != "asked"}

    def __copy__(self, memo=None):
        made = type(self).__new__(type(self))
        made.__setstate__(super().__getstate__())
        return made

    __deepcopy__ = __copy__

    def count(self, h, i, j, n, heads):
        if "asked" not in vars(self):  # just unpickled, when what its function reads may not have been there yet
            vars(self)["asked"] = frozen(self.fn)
        seen = evaluate(self.asked, h, i, j)
        return seen & (j <= i) if self.causal else seen

    def spec(self):
        return {"pattern": "Predicate", "fn": source_of(self.fn), "causal": self.causal}

    @classmethod
    def from_spec(cls, **spec):
        raise ValueError("a Predicate cannot be made from its spec: fn is Python code, call Predicate(fn) with it")

    @property
    def short_name(self):
        return "predicate" if named(self.fn) == "<lambda>" else f"predicate-{named(self.fn)}"

    def __repr__(self):
        return f"Predicate({named(self.fn)}{', causal=True' * self.causal})"


def evaluate(fn, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """fn(h, i, j), checked: bool, of the broadcast shape of i, j and, where the result depends on it, h."""
    want = torch.broadcast_shapes(h.shape, i.shape, j.shape)
    returned = fn(h.clone(), i.clone(), j.clone())  # its own: it may compute in place
    try:
        seen = torch.as_tensor(returned, device=i.device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"predicate returned {returned!r}: want a bool tensor, e.g. (i - j).abs() < 5") from None
    if seen.dtype != torch.bool:
        raise ValueError(f"predicate returned {seen.dtype}: want a bool tensor, e.g. (i - j).abs() < 5")
    try:
        shape = torch.broadcast_shapes(seen.shape, i.shape, j.shape)
        fits = torch.broadcast_shapes(shape, want) == want
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"predicate returned shape {tuple(seen.shape)}: want one that broadcasts with {tuple(want)}")
    return seen.expand(shape)


def named(fn) -> str:
    """A function's name; of an object that is called, its type's."""
    return getattr(fn, "__name__", type(fn).__name__)


def source_of(fn) -> str:
    """A function's source text, or its name where there is none (typed at a prompt, built in)."""
    try:
        return textwrap.dedent(inspect.getsource(fn)).strip()
    except (OSError, TypeError):
        return getattr(fn, "__qualname__", repr(fn))
