"""A branch by cuDNN: its whole segments, as strided views of the inputs that cuDNN's fused attention reads in place.

The heads of a branch keep different positions, so no single strided view has them all. Two kinds of view have some: the
heads of one residue, r heads apart, and consecutive heads, each of which keeps positions one further than the head
before it (a step of one head and one position is one stride). The kind that takes fewer calls is chosen: at most about
the square root of the number of heads. Calls are cut so that their results stay small, and each is merged into out and
lse (forward) or added to the gradients (backward): cuDNN has to be faster than our kernels by more than that costs.

cuDNN sums dq in any order, so its gradients differ in their last bits from run to run: under
`torch.use_deterministic_algorithms` it is not taken for them.

Dimensions of a view: S segments, H heads, L positions that a head keeps in a segment, D head_dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.engines import torch_rules
from workbench.engines.triton import tile_ops, tile_sizes

# The L from which on cuDNN and a merge are faster than our kernels, by direction and by whether head_dim is above 64;
# and that where nothing has to be merged. WORK: what a call must have to be worth its launches. Measured on an H100.
FROM = {("forward", False): 8192, ("forward", True): 1024, ("backward", False): 4096, ("backward", True): 2048}
FROM_WHOLE = 1024
WORK = 5e10  # floating point operations of the forward
INT32 = 1 << 31  # elements, from which on cuDNN's backward is silently wrong (torch 2.11, cuDNN 9.19)
M = 32  # rows of a program that merges or adds


class View(NamedTuple):
    """What one call takes of a sequence: segments from `start`, of `count` heads from `head` on what each keeps there.

    Head x of them is head + x * head_step, and keeps offset + x * offset_step + i * r in a segment, i < length.
    """

    batch: int
    start: int
    segments: int
    w: int
    r: int
    head: int
    head_step: int
    count: int
    offset: int
    offset_step: int
    length: int

    def of(self, x: Tensor, shift: int = 0) -> Tensor:
        """(S, H, L, D) of x (B, rows, heads, D), or (S, H, L) of x (B, rows, heads); row 0: position shift."""
        _, n, h, *d = x.stride()
        at = x.storage_offset() + self.batch * x.stride(0) + (self.start - shift + self.offset) * n + self.head * h
        size = (self.segments, self.count, self.length, *x.shape[3:])
        return x.as_strided(size, (self.w * n, self.head_step * h + self.offset_step * n, self.r * n, *d), at)


def segments(direction: str, branch, causal: bool, q: Tensor, k: Tensor, *others: Tensor) -> range:
    """The segments of a branch that cuDNN takes: those whose positions all exist and have queries; or none of them.

    direction: "forward" or "backward"; others: every other tensor that would be read.
    """
    n, nq, length = k.shape[1], q.shape[1], branch.w // branch.r
    if nq == 0 or length < min(FROM_WHOLE, *FROM.values()):
        return range(0)
    found = range(-(-(n - nq) // branch.w), n // branch.w)
    merged = direction == "backward" or not covers(branch, found, q, k, *others)
    least = FROM[direction, q.shape[3] > 64] if merged else FROM_WHOLE
    if not found or length < least or not usable(direction, q, k, *others):
        return range(0)
    if merged and most(branch.w, q, k, *others) < 1:
        return range(0)
    calls = len(groups(*kept(branch)))
    work = 4 * q.shape[3] * branch.heads * len(found) * length**2 / (2 if causal else 1) / calls
    return found if work >= WORK else range(0)


def most(w: int, *tensors: Tensor) -> int:
    """How many segments of w positions a call may span so that no offset in a view passes int32."""
    return min((INT32 - 1 - x.shape[2] * x.stride(2)) // (w * max(1, x.stride(1))) for x in tensors)


def usable(direction: str, q: Tensor, k: Tensor, *others: Tensor) -> bool:
    """Whether cuDNN's attention is there, takes inputs like these, and was found to be the faster for such."""
    if q.device.type != "cuda" or q.shape[2] != k.shape[2] or not 64 <= q.shape[3] <= 128:
        return False
    if direction == "backward" and torch.are_deterministic_algorithms_enabled():
        return False
    if any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]) for x in (q, k, *others)):
        return False
    if not (torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()):
        return False
    capability = torch.cuda.get_device_capability(q.device)
    return capability >= (9, 0) and "cudnn" in torch_rules.kernels(capability, q.dtype, q.shape[3])


def covers(branch, some: range, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether one call over the segments `some` computes all of out, in the memory layout that out shall have."""
    if not branch.whole or len(some) * branch.w != k.shape[1] or q.stride(1) < q.stride(2):
        return False
    return len(k) == 1 or all(x.stride(0) == x.shape[1] * x.stride(1) for x in (q, k, v))


def kept(branch) -> tuple[list[int], list[int]]:
    """(offsets, L) of the heads of a branch; w need not be a multiple of r."""
    offsets = [(h // branch.divide + branch.plus) % branch.r for h in range(branch.head0, branch.head0 + branch.heads)]
    return offsets, [max(0, -(-(branch.w - o) // branch.r)) for o in offsets]


def views(branch, segments: range, batch: int, row_bytes: int, room: int, limit: int) -> Iterator[View]:
    """The calls of a branch over whole segments of each sequence: row_bytes * rows at most about `room`, segments at
    most `limit`."""
    w, r = branch.w, branch.r
    offsets, length = kept(branch)
    for first, step, count in groups(offsets, length):
        if length[first] == 0:
            continue
        some = max(1, min(limit, room // (count * length[first] * row_bytes)))
        some = -(-len(segments) // -(-len(segments) // some))  # as even as can be
        turn = offsets[first + step] - offsets[first] if count > 1 else 0
        for s in range(segments.start, segments.stop, some):
            for b in range(batch):
                yield View(b, s * w, min(some, segments.stop - s), w, r, branch.head0 + first, step, count,
                           offsets[first], turn, length[first])  # fmt: skip


def groups(offsets: list[int], length: list[int]) -> list[tuple[int, int, int]]:
    """The heads in groups that one view can take, each (first, step, count): of one residue, or consecutive."""
    residues: dict[int, list[int]] = {}
    for x, o in enumerate(offsets):
        residues.setdefault(o, []).append(x)
    apart = [(xs[0], xs[1] - xs[0] if len(xs) > 1 else 1, len(xs)) for xs in residues.values()]
    along, first = [], 0
    for x in range(1, len(offsets) + 1):
        if x == len(offsets) or offsets[x] != offsets[x - 1] + 1 or length[x] != length[first]:
            along.append((first, 1, x - first))
            first = x
    return min(apart, along, key=len)


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (S, H, L, D) and lse (S, H, L) of views."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def attend_backward(grad, q, k, v, out, lse: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) (S, H, L, D) of views, where out and lse may be those of a softmax over more keys than these."""
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that does not happen
    length = q.shape[2]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, length, length, 0.0, causal,
        scale=scale,
    )  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, out, lse, branch, segments: range, causal, scale) -> None:
    """Merge the branch over whole segments into out and lse; one that is `whole` writes them instead."""
    shift, lse, row_bytes = k.shape[1] - q.shape[1], lse.transpose(1, 2), q.shape[3] * q.element_size()
    for view in views(branch, segments, len(q), row_bytes, room(out, 24), most(branch.w, q, k, v)):
        results = attend(view.of(q, shift), view.of(k), view.of(v), causal, scale)
        merge(*results, view.of(out, shift), view.of(lse, shift), first=branch.whole)
        del results  # before the next ones are made


def room(result: Tensor, share: int) -> int:
    """Bytes that the results of one call may take: a small share of `result`, or a small constant if that is more."""
    return max((3 << 29) // share, result.numel() * result.element_size() // share)


def whole(q: Tensor, k: Tensor, v: Tensor, w: int, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out (B, N, H, D) and lse (B, H, N) of a branch that keeps everything, in one call that writes them itself."""
    some, its_lse = attend(*(x.view(-1, w, *x.shape[2:]).transpose(1, 2) for x in (q, k, v)), causal, scale)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    lse.unflatten(2, (-1, w)).copy_(its_lse.unflatten(0, (q.shape[0], -1)).transpose(1, 2))
    return some.transpose(1, 2).reshape(q.shape), lse


def backward(grad, q, k, v, out, lse, dq, dk, dv, branch, segments: range, causal, scale) -> None:
    """Add the branch's gradients over whole segments to dq, dk and dv; one that is `whole` writes them instead."""
    shift, lse = k.shape[1] - q.shape[1], lse.transpose(1, 2)
    row_bytes, limit = 2 * q.shape[3] * q.element_size(), most(branch.w, grad, q, k, v, out)  # cuDNN's dq is float32
    for view in views(branch, segments, len(q), row_bytes, room(dq, 12), limit):
        results = attend_backward(
            view.of(grad, shift), view.of(q, shift), view.of(k), view.of(v), view.of(out, shift), view.of(lse, shift),
            causal, scale,
        )  # fmt: skip
        for x, to in enumerate((view.of(dq, shift), view.of(dk), view.of(dv))):
            launch(add_kernel, results[x], to, first=branch.whole and (x == 0 or shift == 0))
        del results


@triton.jit
def place(length, heads, M: tl.constexpr):
    """Of this program: segment, head, rows. Programs side by side have the heads of the same rows, a run of memory."""
    many, x = tl.cdiv(length, M), tl.program_id(0)
    h, x = x % heads, x // heads
    return (x // many).to(tl.int64), h.to(tl.int64), (x % many) * M + tl.arange(0, M)


@triton.jit(do_not_specialize=["heads", "length"])
def merge_kernel(SOME, ITS, OUT, LSE, s_s, s_h, s_n, i_s, i_h, i_n, o_s, o_h, o_n, l_s, l_h, l_n, heads, length,
                 D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    s, h, i = place(length, heads, M)
    d, ours, row = tl.arange(0, BLOCK_D), i < length, i.to(tl.int64)
    out = tile_ops.load(SOME + s * s_s + h * s_h + row[:, None] * s_n + d[None, :], ours, d, D, True).to(tl.float32)
    lse = tl.load(ITS + s * i_s + h * i_h + row * i_n, ours, 0.0)
    tile_ops.merge(OUT + s * o_s + h * o_h + row[:, None] * o_n + d[None, :], LSE + s * l_s + h * l_h + row * l_n,
                out, lse, ours, d, D, FIRST)  # fmt: skip


@triton.jit(do_not_specialize=["heads", "length"])
def add_kernel(SOME, TO, s_s, s_h, s_n, t_s, t_h, t_n, heads, length,
               D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, FIRST: tl.constexpr):  # fmt: skip
    s, h, i = place(length, heads, M)
    d, ours, row = tl.arange(0, BLOCK_D), i < length, i.to(tl.int64)
    some = tile_ops.load(SOME + s * s_s + h * s_h + row[:, None] * s_n + d[None, :], ours, d, D, True).to(tl.float32)
    tile_ops.add(TO + s * t_s + h * t_h + row[:, None] * t_n + d[None, :], some, ours, d, D, FIRST)


def merge(*tensors: Tensor, first: bool = False) -> None:
    """Merge some and its lse into out (S, H, L, D) and lse (S, H, L), in place; `first`: overwrite them."""
    launch(merge_kernel, *tensors, first=first)


def launch(kernel, *tensors: Tensor, first: bool) -> None:
    segments, heads, length, d = tensors[0].shape
    kernel[(segments * heads * -(-length // M),)](
        *tensors, *tile_ops.strides(*tensors), heads, length, D=d, BLOCK_D=tile_sizes.padded(d), M=M, FIRST=first,
    )  # fmt: skip
