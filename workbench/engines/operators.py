"""Attention as torch operators, so that compile, checkpointing, autograd and torch.func see one opaque call each way.

An operator cannot take a pattern, so it takes the pattern's `handle`, a string. In the process of the pattern the
string finds that pattern; elsewhere, as in a program that torch.export saved, an equal one is made from its spec.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""

from __future__ import annotations

import functools
import itertools
import json
import uuid
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from workbench.patterns import Pattern, from_spec

# --- patterns by name ------------------------------------------------------------------------------------------------

LONGEST = 1 << 14  # characters of a spec that travels with every call
REBUILT = 64  # patterns made from specs that are kept
PROCESS = uuid.uuid4().hex
_numbers = itertools.count()
_living: weakref.WeakValueDictionary[str, Pattern] = weakref.WeakValueDictionary()


def handle_of(pattern: Pattern) -> str:
    """The string that names the pattern to an operator: its number in this process and, if it has one, its spec."""
    return pattern.answer(_handle)


def _handle(pattern: Pattern) -> str:
    if "_handle" not in pattern.__dict__:
        with _disable_current_modes(), torch._C._DisableFuncTorch():  # it may read a tensor of the pattern's
            spec = _spec_of(pattern)
        pattern.__dict__["_handle"] = f"{next(_numbers)} {spec or f'{PROCESS} {pattern!r}'}"
        _living[pattern.__dict__["_handle"]] = pattern
    return pattern.__dict__["_handle"]


def _spec_of(pattern: Pattern) -> str | None:
    """The pattern's spec as JSON, None where nothing can be made from it or where it is long."""
    layout = getattr(pattern, "layout", None)
    if pattern.function is not None:
        return None
    if sum(t.numel() for t in _tensors(layout) if t is not None) > 8 * LONGEST:
        return None
    try:
        spec = json.dumps(pattern.spec())
    except (NotImplementedError, TypeError):  # a pattern class of the user's
        return None
    return spec if len(spec) <= LONGEST else None


def _tensors(layout) -> list[Tensor]:
    return [] if layout is None else [layout.tensor, *(t for part in layout.of for t in _tensors(part))]


def living(handle: str) -> Pattern:
    """The pattern that has this handle, or else one made from its spec; ValueError where it has none."""
    found = _living.get(handle)
    return _rebuilt(handle) if found is None else found


@functools.lru_cache(REBUILT)
def _rebuilt(handle: str) -> Pattern:
    spec = handle.partition(" ")[2]
    if not spec.startswith("{"):
        raise ValueError(
            f"the pattern {spec.partition(' ')[2]} of this program is gone: a Python function, or a layout whose spec "
            f"is longer than {LONGEST:,} characters, is not saved with a program; export it again in this process"
        )
    return from_spec(json.loads(spec))


# --- derivatives that the operators do not have ----------------------------------------------------------------------

FORWARD_MODE = (
    "forward-mode derivatives (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad) of attention are those of "
    "backend='reference' only; reverse mode (torch.func.grad, vjp, jacrev, and vmap of them) is that of all"
)
SECOND = "second derivatives of attention are those of backend='reference' only"


def _refuse_second(*_):
    raise ValueError(SECOND)


def refuse_second(grads, _):
    """The hook of a node of torch's own attention: where its gradients have no derivative, that is said as ours is."""
    for grad in grads:
        if type(getattr(grad, "grad_fn", None)).__name__ == "NotImplemented":  # only under create_graph is there any
            grad.grad_fn.register_prehook(_refuse_second)


def forward_mode(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors carries a tangent."""
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def transformed(*tensors: Tensor) -> bool:
    """Whether this is inside a transform of torch.func (grad, vmap, jvp, ...), or one of the tensors has a tangent."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_mode(*tensors)


# --- the operators ---------------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("workbench", "FRAGMENT")
BODIES: dict[torch._ops.OpOverload, Callable] = {}  # of each operator, the Python that it runs
OF_CALL = "Tensor q, Tensor k, Tensor v"
OF_PATTERN = "str pattern, float scale"


def define(name: str, forward: Callable, backward: Callable):
    """The operators `name` and `name`_backward, of forward(q, k, v, pattern, scale) and its derivative.

    forward returns out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D) and k, v (B, N, G, D), of any strides.
    backward(grad, grad_lse or None, q, k, v, out, lse, pattern, scale) returns (dq, dk, dv). The operators take
    `handle_of` the pattern. In reverse mode they go through torch.func too; other derivatives are refused.
    """

    def run(q, k, v, handle, scale):
        return forward(q, k, v, living(handle), scale) if q.numel() else _shapes(q, k, v, handle, scale)

    def run_backward(grad, grad_lse, q, k, v, out, lse, handle, scale):
        if q.numel() == 0:
            return tuple(x.new_zeros(x.shape) for x in (q, k, v))
        return backward(grad, grad_lse, q, k, v, out, lse, living(handle), scale)

    attend = _operator(f"{name}({OF_CALL}, {OF_PATTERN}) -> (Tensor, Tensor)", run, _shapes)
    attend_backward = _operator(
        f"{name}_backward(Tensor grad, Tensor? grad_lse, {OF_CALL}, Tensor out, Tensor lse, {OF_PATTERN})"
        " -> (Tensor, Tensor, Tensor)",
        run_backward,
        lambda grad, grad_lse, q, k, v, out, lse, handle, scale: tuple(x.new_empty(x.shape) for x in (q, k, v)),
    )

    def keep(ctx, arguments, results):
        *_, ctx.handle, ctx.scale = arguments
        ctx.pattern = living(ctx.handle)  # keeps it alive until the backward
        ctx.asked = ctx.pattern.fingerprint()
        ctx.save_for_backward(*arguments[:3], *results)
        ctx.set_materialize_grads(False)

    def gradient(ctx, grad, grad_lse):
        if grad is None and grad_lse is None:
            return (None,) * 5
        ctx.pattern.unchanged(ctx.asked)
        q, k, v, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        return *attend_backward(grad, grad_lse, q, k, v, out, lse, ctx.handle, ctx.scale), None, None

    _differentiate(attend, keep, gradient)
    _differentiate(attend_backward, lambda *_: None, _refuse_second)
    return attend, attend_backward


def call(op, *args):
    """The operator, or the Python that it runs where nothing has to see the call: gradients, transforms, modes, a
    compiler, tensors without data. The way through the dispatcher takes as long as a small kernel."""
    tensors = args[:3]
    seen = any(type(x) is not Tensor or x.is_meta for x in tensors)
    seen = seen or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or transformed(*tensors)
    seen = seen or torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return op(*args) if seen else BODIES[op](*args)


def lse_dtype(q: Tensor) -> torch.dtype:
    """lse is float32, and float64 for float64 inputs."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _shapes(q, k, v, handle, scale):
    b, nq, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, nq), dtype=lse_dtype(q))


def _operator(schema: str, body: Callable, fake: Callable):
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, torch._disable_dynamo(body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"workbench::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.workbench, name).default
    torch.library.register_vmap(f"workbench::{name}", functools.partial(_one_by_one, op), lib=LIBRARY)
    BODIES[op] = body
    return op


def _one_by_one(op, info, in_dims, *args):
    """The rule of torch.vmap: a call for each entry."""
    pairs, many = list(zip(args, in_dims, strict=True)), info.batch_size
    if not many:  # the shapes of one entry, of which there is none
        pairs = [(x, dim) if dim is None else (x.sum(dim, keepdim=True), dim) for x, dim in pairs]
    entries = [op(*(x if dim is None else x.select(dim, at) for x, dim in pairs)) for at in range(max(1, many))]
    results = tuple(torch.stack(x)[:many] for x in zip(*entries, strict=True))
    return results, (0,) * len(results)


def _differentiate(op, keep: Callable, gradient: Callable) -> None:
    """Give the operator an autograd kernel, as torch.library.register_autograd does, but one that goes through
    torch.func, and that refuses forward mode, of which torch's would return a tangent of zeros."""

    def below(keyset, args):
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *args):
            with torch.enable_grad():  # of the levels further out, in torch.func
                results = below(keyset, args)
            keep(ctx, args, results)
            return results

        @staticmethod
        def backward(ctx, *grads):
            return None, *gradient(ctx, *grads)

    def kernel(keyset, *args):
        if forward_mode(*args):
            raise ValueError(FORWARD_MODE)
        if not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)):
            return below(keyset, args)
        # Here torch.func is at one of its levels. Function.apply would begin again at the outermost one.
        with torch._functorch.autograd_function.enable_single_level_autograd_function():
            return super(torch.autograd.Function, Differentiable).apply(keyset, *args)

    LIBRARY.impl(op._schema.name.partition("::")[2], kernel, "Autograd", with_keyset=True)
