"""One attention call to be probed: sizes, pattern and backend, from which the inputs, the call and the row are made.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, Hkv key heads, D head_dim.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.engines import dispatch
from workbench.engines.torch.fused import expand_heads
from workbench.harness.processes import imported
from workbench.patterns import Dense, Pattern, checks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUSED = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
BASELINES = ("sdpa", "eager", *FUSED)


@dataclass(frozen=True)
class Case:
    """A call of attention with random inputs.

    dtype: a torch dtype or its name
    mode: "fwd", or "fwdbwd" for the gradients of q, k and v too
    backend: one of `attention`'s; "sdpa" (torch's dense attention, whichever kernel torch picks) or one kernel of it,
        "cudnn", "flash" or "efficient"; "eager" (dense attention that holds all scores at once); or any function of
        q (B, Nq, H, D), k and v (B, N, Hkv, D), given as itself or as "module:function"

    ValueError for what no call of attention can be.
    """

    pattern: object
    n: int
    heads: int
    head_dim: int
    dtype: torch.dtype | str = torch.float32
    backend: str | Callable = "auto"
    mode: str = "fwd"
    device: str = "cpu"
    batch: int = 1
    kv_heads: int | None = None
    nq: int | None = None
    seed: int = 0
    timed = True  # whether its modelled time, which is attention's, is all of its time

    def __post_init__(self):
        if not isinstance(self.pattern, Pattern):
            raise ValueError(f"pattern={self.pattern!r}: want a pattern, e.g. Dense() or Dilated([2048, 4096], [1, 2])")
        checks.choice("mode", self.mode, "fwd", "fwdbwd")
        if not callable(self.backend) and not isinstance(self.backend, str):
            raise ValueError(f"backend={self.backend!r}: want a name, 'module:function' or a function of q, k and v")
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if dtype not in DTYPES:
            names = ", ".join(str(x).removeprefix("torch.") for x in DTYPES)
            raise ValueError(f"dtype={self.dtype!r}: want one of {names}")
        sizes = {"n": 0, "heads": 0, "head_dim": 1, "batch": 0, "seed": 0}
        for name, least in sizes.items():
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), least))
        for name, default in (("kv_heads", self.heads), ("nq", self.n)):
            value = getattr(self, name)
            object.__setattr__(self, name, default if value is None else checks.whole(name, value, 0))
        if self.nq > self.n:
            raise ValueError(f"nq={self.nq}, n={self.n}: want at most as many queries as keys")
        if self.heads and (not self.kv_heads or self.heads % self.kv_heads):
            raise ValueError(f"{self.kv_heads} key heads do not divide {self.heads} query heads: want a divisor")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "device", checks.device(self.device))

    def at(self, n: int) -> Case:
        """This case at another N; where there are as many queries as keys, there are again."""
        return replace(self, n=n, nq=None if self.nq == self.n else self.nq)

    def fields(self) -> dict:
        """The record's fields that say what this is and re-run it; backend_source where the function is a user's."""
        backend = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "callable")
        source = source_of(self.backend)
        return {
            "pattern": self.pattern.short_name, "backend": backend, "n": self.n, "heads": self.heads,
            "head_dim": self.head_dim, "dtype": str(self.dtype).removeprefix("torch."), "causal": self.pattern.causal,
            "mode": self.mode, "world": 1, "strategy": None, "batch": self.batch, "kv_heads": self.kv_heads,
            "nq": self.nq, "seed": self.seed, "pattern_spec": self.pattern.spec(), "device": self.device,
        } | ({"backend_source": source} if source else {})  # fmt: skip

    def prepare(self) -> tuple[Callable[[], object], str]:
        """Make the inputs; return the call, which needs no argument, and the backend that 'auto' stands for.

        ValueError or NotImplementedError where this cannot be run, with the reason.
        """
        random = torch.Generator(self.device).manual_seed(self.seed)

        def make(shape):
            return torch.randn(shape, generator=random, device=self.device, dtype=self.dtype)

        return self.prepare_from(make)

    def prepare_from(self, make: Callable[[tuple[int, ...]], Tensor]) -> tuple[Callable[[], object], str]:
        """`prepare` with inputs (and, in mode "fwdbwd", an upstream gradient) that make(shape) gives."""
        backward = self.mode == "fwdbwd"
        of_q, of_k = (self.nq, self.heads), (self.n, self.kv_heads)
        shapes = ((self.batch, *rows, self.head_dim) for rows in (of_q, of_k, of_k))
        q, k, v = (make(shape).requires_grad_(backward) for shape in shapes)
        function, name = self.function(q, k, v)
        upstream = make(q.shape) if backward else None

        def call():
            with torch.set_grad_enabled(backward):
                out = function(q, k, v)
                return torch.autograd.grad(out, (q, k, v), upstream) if backward else out

        return call, name

    def function(self, q: Tensor, k: Tensor, v: Tensor, return_lse=False) -> tuple[Callable, str]:
        """(the function of q, k and v that `backend` names, its name). return_lse: it gives (out, lse), where lse is
        None for a baseline and a user's function."""
        function, name = self.backend, self.backend
        if not isinstance(name, str):
            name = self.fields()["backend"]
        elif ":" in name:
            function = imported(name)
        elif name in BASELINES:
            function = _baseline(name, self)
        else:
            name = dispatch.choose("auto", q, k, v, self.pattern)[0] if name == "auto" else name
            if reason := dispatch.why_not(name, q, k, v, self.pattern):
                raise ValueError(reason)
            return partial(dispatch.attention, pattern=self.pattern, backend=name, return_lse=return_lse), name
        return (lambda *x: (function(*x), None)) if return_lse else function, name


def source_of(backend: str | Callable) -> str | None:
    """None for what is in this package, of which a record has the fingerprint; of a function of the user's, given as in
    `Case`, what no record has: it may have been edited, so that nothing that was measured of it is taken for it."""
    if isinstance(backend, str):
        module, function, _ = backend.partition(":")
        ours = not function
    else:
        module, ours = getattr(backend, "__module__", None) or "", False
    ours = ours or module.partition(".")[0] == __package__.partition(".")[0]
    return None if ours else uuid.uuid4().hex[:12]


def _baseline(name: str, case: Case) -> Callable:
    """torch's own dense attention on (B, N, H, D)."""
    if not isinstance(case.pattern, Dense):
        raise ValueError(f"backend={name!r} with {case.pattern.name}: it computes Dense only")
    if name == "eager":
        return lambda q, k, v: eager(q, k, v, case.pattern.causal)
    if case.pattern.causal and case.nq != case.n:
        raise ValueError(f"backend={name!r}, causal, nq={case.nq}, n={case.n}: torch aligns the first query with key 0")
    if name in FUSED and not case.device.startswith("cuda"):
        raise NotImplementedError(f"{name} runs on CUDA only, not on {case.device}")

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
        grouped = {"enable_gqa": True} if case.kv_heads != case.heads else {}
        with sdpa_kernel(getattr(SDPBackend, FUSED[name])) if name in FUSED else contextlib.nullcontext():
            return scaled_dot_product_attention(q, k, v, is_causal=case.pattern.causal, **grouped).transpose(1, 2)

    return sdpa


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Dense attention by its formula, with all Nq x N scores in memory: q, k, v -> out (B, Nq, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, N, D)
    scores = q @ expand_heads(k, q).transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, H, Nq, N)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return (torch.softmax(scores, -1) @ expand_heads(v, q)).transpose(1, 2)


def case_of(value) -> Case:
    """The value, which has to be a Case."""
    if not isinstance(value, Case):
        said = checks.describe(value)
        raise ValueError(f"case={said}: want a Case, e.g. Case(Dense(), n=4096, heads=8, head_dim=64)")
    return value
