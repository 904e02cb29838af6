"""Attention as torch operators, so that compile, checkpointing and autograd see one opaque call each way.

An operator cannot take a pattern, so it takes the pattern's key, a string by which this process finds it.

Dimensions: B batch, N keys, Nq queries (the last Nq of the N positions), H query heads, G key heads, D head_dim.
"""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from workbench.engines.merge import lse_dtype
from workbench.engines.torch.fused import unit_stride
from workbench.patterns import Pattern
from workbench.patterns.checks import LIVING

TRANSFORMED = (
    "transforms of torch.func and forward-mode derivatives of attention are those of backend='reference' only: "
    "torch.autograd.grad and backward go through all"
)
SECOND = "second derivatives of attention are those of backend='reference' only"


def handle_of(pattern: Pattern) -> str:
    """The string that names the pattern to an operator."""
    if _exporting():
        raise ValueError("torch.export saves no Python object, as a pattern is: use torch.compile, in each process")
    return pattern.key


def _exporting() -> bool:
    return torch.compiler.is_exporting()


# What torch.compiler.assume_constant_result sets: so it is asked in Python. Traced by torch.compile of torch 2.11,
# is_exporting() is always true.
_exporting._dynamo_marked_constant = True


def refuse_transforms(*tensors: Tensor) -> None:
    """ValueError inside a transform of torch.func (grad, vmap, jvp, ...), and where a tensor carries a tangent."""
    if torch.compiler.is_compiling():
        return
    dual = any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    if dual or torch._C._are_functorch_transforms_active():
        raise ValueError(TRANSFORMED)


def _refuse_second(*_):
    raise ValueError(SECOND)


LIBRARY = torch.library.Library("workbench", "FRAGMENT")
BODIES: dict[torch._ops.OpOverload, Callable] = {}  # of each operator, the Python that it runs
OF_CALL = "Tensor q, Tensor k, Tensor v"
OF_PATTERN = "str pattern, float scale"


def define(name: str, forward: Callable, backward: Callable, more: str = "", numbers: str = ""):
    """The operators `name` and `name`_backward, of forward(q, k, v, *more, pattern, scale, *numbers), its derivative.

    forward returns out (B, Nq, H, D) and lse (B, H, Nq) from q (B, Nq, H, D) and k, v (B, N, G, D), of any strides.
    backward(grad, grad_lse or None, q, k, v, *more, out, lse, pattern, scale, *numbers) returns the gradients of q, k,
    v and *more, an empty tensor for None. The operators take `handle_of` the pattern. more, numbers: the schema of
    tensors and of numbers that there are besides. Both get tensors whose last strides are 1, on the current device.
    """
    many = 3 + more.count("Tensor")

    def run(*args, **into):
        tensors, (handle, *rest) = args[:many], args[many:]
        if not args[0].numel():
            return _shapes(*args)
        with device_of(args[0]):
            return forward(*map(unit_stride, tensors), LIVING[handle], *rest, **into)

    def like(x, q):
        return q.new_empty(0) if x is None else x.new_empty(x.shape)

    def run_backward(*args):
        tensors, (handle, *rest) = args[: many + 4], args[many + 4 :]
        if tensors[2].numel() == 0:
            return tuple(like(x, tensors[2]).zero_() for x in tensors[2:-2])
        with device_of(tensors[0]):
            return backward(*map(unit_stride, tensors), LIVING[handle], *rest)

    of_call, of_pattern = OF_CALL + more, OF_PATTERN + numbers
    attend = _operator(f"{name}({of_call}, {of_pattern}) -> (Tensor, Tensor)", run, _shapes)
    attend_backward = _operator(
        f"{name}_backward(Tensor grad, Tensor? grad_lse, {of_call}, Tensor out, Tensor lse, {of_pattern})"
        f" -> ({', '.join(['Tensor'] * many)})",
        run_backward,
        lambda *args: tuple(like(x, args[2]) for x in args[2 : 2 + many]),
    )

    def keep(ctx, inputs, output):
        ctx.handle, *ctx.numbers = inputs[many:]
        ctx.pattern = LIVING[ctx.handle]  # keeps it alive until the backward
        ctx.save_for_backward(*inputs[:many], *output)
        ctx.set_materialize_grads(False)

    def gradient(ctx, grad, grad_lse):
        rest = (None,) * (1 + len(ctx.numbers))
        if grad is None and grad_lse is None:
            return (None,) * many + rest
        *inputs, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        found = attend_backward(grad, grad_lse, *inputs, out, lse, ctx.handle, *ctx.numbers)
        return *(None if x is None else y for x, y in zip(inputs, found, strict=True)), *rest

    torch.library.register_autograd(f"workbench::{name}", gradient, setup_context=keep, lib=LIBRARY)
    torch.library.register_autograd(f"workbench::{name}_backward", _refuse_second, lib=LIBRARY)
    return attend, attend_backward


def call(op, *args, **into):
    """The operator, or the Python that it runs where nothing has to see the call: gradients, modes, a compiler, tensors
    without data. The way through the dispatcher takes as long as a small kernel.

    into: out=, a tensor that this Python writes and returns; an operator makes its own.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    seen = any(type(x) is not Tensor or x.is_meta for x in tensors)
    seen = seen or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    seen = seen or torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if seen:
        return op(*args)
    if not torch.autograd._profiler_enabled():
        return BODIES[op](*args, **into)
    with torch.profiler.record_function(op.name()):  # a profile names the call, whichever way it goes
        return BODIES[op](*args, **into)


def device_of(x: Tensor):
    """Triton launches on the current device: that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()


def _shapes(q, *_):
    b, nq, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, nq), dtype=lse_dtype(q))


def _operator(schema: str, body: Callable, fake: Callable):
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    uncompiled, key = torch._disable_dynamo(body), "CompositeExplicitAutograd"  # which imports the compiler, in seconds
    LIBRARY.impl(name, lambda *args: (uncompiled if "_dynamo" in vars(torch) else body)(*args), key)
    torch.library.register_fake(f"workbench::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.workbench, name).default
    BODIES[op] = body
    return op
