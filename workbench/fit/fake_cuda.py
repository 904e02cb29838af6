"""A card that is not there: for a program "cuda" means `meta`, torch.cuda describes the card, and Triton's kernels do
nothing. An operation whose result depends on data that the card would have raises."""

import contextlib
import threading
import types

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from workbench.engines import fa4, torch_rules
from workbench.fit.cards import VIRTUAL, Card

CUDA, META = torch.device("cuda", 0), torch.device("meta")
SHARED_MEMORY = {(7, 0): 98_304, (7, 5): 65_536, (8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448,
                 (10, 0): 232_448, (12, 0): 101_376}  # bytes a block, CUDA C++ programming guide, table 21  # fmt: skip

ENABLED = {
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled, "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled, "math": torch.backends.cuda.math_sdp_enabled,
}  # fmt: skip


class CannotTrace(ValueError):
    """The program looks at data that tensors without data do not have, or takes a way that is not known here."""


class OnCard(TorchFunctionMode):
    """Calls that name a CUDA device get meta tensors; meta tensors say that they are on CUDA."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card
        self.kernel: str | None = None  # the one behind the last call of torch's attention
        self.casts: dict[int, torch.Tensor] = {}  # autocast's cache: parameters in 16 bits, by id

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in PLAIN:  # most calls are these
            return func(*args)
        kwargs = kwargs or {}
        if func in _GETTERS:
            return _GETTERS[func](func(*args, **kwargs))
        if func is F.multi_head_attention_forward:
            with self:
                return INSIDE(*args, **kwargs)
        if torch.is_autocast_enabled("cuda") and (to := CASTS.get(func)):
            args, kwargs = tree_map_only(torch.Tensor, lambda x: self.cast(x, to), (args, kwargs))
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return self.attention(*args, **kwargs)
        if func is torch.Tensor.cuda:
            func, args = torch.Tensor.to, (args[0], META)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = kwargs | {"device": META}
        if func is torch.Tensor.to:
            args = tuple(META if _is_cuda(x) else x for x in args)
        return func(*args, **kwargs)

    def cast(self, x, to: str):
        """x as torch.autocast casts it, which has no rules for meta tensors: a parameter once, until autocast ends."""
        dtype = torch.get_autocast_dtype("cuda") if to == "lower" else torch.float32
        if not (x.is_meta and x.is_floating_point()) or x.dtype in (dtype, torch.float64):
            return x
        if to == "exact" or not (x.requires_grad and x.is_leaf):
            return x.to(dtype)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(dtype)
        return self.casts[id(x)]

    def attention(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        """What torch runs there: the first kernel that takes the call (`torch_rules`) and is enabled."""
        if attn_mask is not None or dropout_p:
            raise CannotTrace("scaled_dot_product_attention with a mask or dropout is not followed")
        aten, d, grouped = torch.ops.aten, q.shape[-1], k.shape[1] != q.shape[1]
        if self.card.key == VIRTUAL:  # which gives its lse also where nobody asks for it
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)[0]
        lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        found = torch_rules.kernels(
            self.card.capability, q.dtype, d, grouped=grouped, n=k.shape[2], nq=q.shape[2], causal=is_causal,
            gradients=lse,
        )  # fmt: skip
        if grouped and not enable_gqa:
            found = ("math",)  # which broadcasts a single head
        self.kernel = next((x for x in found if ENABLED[x]()), None)
        if self.kernel is None:
            raise NotImplementedError(f"No available kernel for {q.dtype} and head_dim {d} on {self.card.name}")
        if self.kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(q, k, v, None, lse, 0.0, is_causal, False, scale=scale)[0]
        if self.kernel == "flash":
            scale = d**-0.5 if scale is None else scale
            q, k, v = (F.pad(x, (0, -d % 8)) if d % 8 else x for x in (q, k, v))
            out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[0]
            return out[..., :d] if d % 8 else out
        if self.kernel == "efficient":
            return aten._scaled_dot_product_efficient_attention(q, k, v, None, lse, 0.0, is_causal, scale=scale)[0]
        if enable_gqa and grouped:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return aten._scaled_dot_product_attention_math(q, k, v, None, 0.0, is_causal, scale=scale)[0]


def _unasked(func: types.FunctionType) -> types.FunctionType:
    """A Python function of torch's that does not hand itself to the mode, so that the mode sees what it calls."""
    scope = vars(F) | dict.fromkeys(("has_torch_function", "has_torch_function_variadic"), lambda *_: False)
    return types.FunctionType(func.__code__, scope, argdefs=func.__defaults__)


INSIDE = _unasked(F.multi_head_attention_forward)


def _is_cuda(x) -> bool:
    return (isinstance(x, torch.device) and x.type == "cuda") or (isinstance(x, str) and x.startswith("cuda"))


# What torch.autocast computes in 16 bits and in float32 (aten/src/ATen/autocast_mode.h), as far as models use it.
CASTS = dict.fromkeys((
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm,
    torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm,
), "lower") | dict.fromkeys((
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss, torch.exp,
), "exact")  # fmt: skip
PLAIN = {torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.__len__}
_GETTERS = {
    torch.Tensor.device.__get__: lambda device: CUDA if device.type == "meta" else device,
    torch.Tensor.is_cuda.__get__: lambda _: True,
}


# What a checkpoint compares of a tensor and the one that it computes again: not the device, which is "cuda" or meta.
CHECKS = {"default": lambda x: (x.shape, x.dtype), "none": lambda _: None}


@contextlib.contextmanager
def impersonate(card: Card, functions: OnCard):
    """torch.cuda as it is on the card, and kernels of Triton that do nothing. functions: entered inside."""
    shared = SHARED_MEMORY.get(card.capability, 101_376)
    properties = types.SimpleNamespace(
        name=card.name, total_memory=card.total_bytes, major=card.capability[0], minor=card.capability[1],
        shared_memory_per_block_optin=shared,
    )  # fmt: skip
    cuda = types.ModuleType("torch.cuda")
    vars(cuda).update(
        vars(torch.cuda), is_available=lambda: True, current_device=lambda: 0,
        device=lambda *_: contextlib.nullcontext(),
        get_device_capability=lambda *_: torch_rules.PROCESSOR if card.key == VIRTUAL else card.capability,
        get_device_properties=lambda *_: properties, is_bf16_supported=lambda *_: True, set_rng_state=lambda *_: None,
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
    )  # fmt: skip

    def backward(*args, run=torch.autograd._engine_run_backward, **kwargs):
        with functions:  # which torch leaves as it calls this, and what a checkpoint computes again is on the card, too
            return run(*args, **kwargs)

    silent = types.SimpleNamespace(**dict.fromkeys(("forward", "backward", "convert"), lambda *_: None))
    found = [
        (torch, "cuda", cuda),
        (torch, "clear_autocast_cache", functions.casts.clear),
        (torch.autograd, "_engine_run_backward", backward),
        (checkpoint, "_allowed_determinism_checks_to_fns", CHECKS),
        (torch.backends.cudnn, "is_available", lambda: True),
        (fa4, "STAND_IN", silent),
    ]
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter, jit

        found += [(jit.JITFunction, "run", lambda *_, **__: None)]
        found += [(interpreter.GridExecutor, "__call__", lambda *_, **__: None)]
    with LOCK, replaced(found):
        yield


@contextlib.contextmanager
def replaced(what: list[tuple]):
    """While the block lasts, attributes have other values: what is a list of (object, name, value)."""
    kept = [(where, name, getattr(where, name)) for where, name, _ in what]
    try:
        for where, name, new in what:
            setattr(where, name, new)
        yield
    finally:
        for where, name, old in kept:
            setattr(where, name, old)


LOCK = threading.RLock()
