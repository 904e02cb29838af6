"""What `engine` runs on a card, computed densely in float32 on the CPU: the kernels (`compiled`) from their lists, and
what is done beside them (`places`)."""

import torch
from torch import Tensor

from workbench.engines.fa4.engine import wide
from workbench.engines.fa4.lists import SHIFT, Lists
from workbench.engines.fa4.plans import Variant
from workbench.patterns.tile_order import TILE, TileOrder

LOG2E = 1.4426950408889634


def forward(variant: Variant, q, k, v, out, lse, scale, scalar, lists) -> None:
    (b, nq, h, _), n = q.shape, k.shape[1]
    assert out.shape == q.shape and lse.shape == (b, h, nq) and k.shape[2] * variant.group == h
    of_q, of_k = positions(variant, nq), positions(variant, n)
    count = counts(variant, scalar, lists, b, h, nq, n, False)
    q, (k, v) = q[:, of_q].float(), (x[:, of_k].float().repeat_interleave(variant.group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale + count.log()
    row = s.logsumexp(-1)
    out[:, of_q] = torch.einsum("bhij,bjhd->bihd", (s - row[..., None]).exp().nan_to_num(0.0), v).to(out.dtype)
    lse[:, :, of_q] = row


def backward(variant: Variant, q, k, v, grad, lse2, delta, dq, dk, dv, scale, scalar, lists) -> None:
    (b, nq, h, d), (n, g) = q.shape, k.shape[1:3]
    assert h == g * variant.group and lse2.shape == delta.shape and lse2.shape[2] >= nq
    of_q, of_k = positions(variant, nq), positions(variant, n)
    count = counts(variant, scalar, lists, b, h, nq, n, True)
    q, grad = q[:, of_q].float(), grad[:, of_q].float()
    k, v = (x[:, of_k].float().repeat_interleave(variant.group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    p = count * (s - lse2[..., :nq, None] / LOG2E).exp()
    ds = p * (torch.einsum("bihd,bjhd->bhij", grad, v) - delta[..., :nq, None])
    summed(dq, d)[:, :, :nq] += torch.einsum("bhij,bjhd->bhid", ds, k)
    for to, x, y, by in ((dk, ds, q, scale), (dv, p, grad, 1)):
        found = torch.einsum("bhij,bihd->bhjd", x, y).unflatten(1, (g, variant.group)).sum(2)
        if variant.group > 1:
            summed(to, d)[:, :, :n] += found
        else:
            to[:, of_k] = (found * by).transpose(1, 2).to(to.dtype)


def convert(variant: Variant, of_queries: bool, sums, to, scale) -> None:
    to.copy_(summed(sums, variant.head_dim)[:, :, : to.shape[1]].transpose(1, 2) * scale)


def summed(x: Tensor, d: int) -> Tensor:
    """Sums as (B, heads, rows, D)."""
    return x.unflatten(2, (-1, wide(d)))[..., :d]


def positions(variant: Variant, n: int) -> Tensor:
    """Where the kernel reads the token of each place."""
    return TileOrder(n, *variant.order).position(torch.arange(n)) if variant.natural else torch.arange(n)


def counts(variant: Variant, scalar, lists: Lists | None, b: int, h: int, nq: int, n: int, by_keys: bool) -> Tensor:
    """float32 (B, H, Nq, N): how often the lists and the mask show each key to each query, by their places."""
    i, j = torch.arange(nq)[:, None], torch.arange(n)
    if lists is None:
        seen = torch.ones(nq, n, dtype=torch.bool)
        if variant.causal:
            seen = j <= i + n - nq
        if variant.band:
            seen = inside(variant.band, scalar, i + n - nq - j)
        return seen.float().expand(b, h, nq, n)
    lines, others = (-(-x // TILE) for x in ((n, nq) if by_keys else (nq, n)))
    total = torch.zeros(2, b, h, lines, others)
    for kind, (counts, entries) in enumerate(((lists.partial_counts, lists.partial), (lists.full_counts, lists.full))):
        assert counts.shape == (b, h, lines)
        listed = torch.arange(entries.shape[-1]) < counts[..., None]
        x, y, line, place = listed.nonzero(as_tuple=True)
        entry = entries[x, y, line, place].long()
        times = entry >> SHIFT if variant.weighed else torch.ones_like(entry)
        assert (times > 0).all() and (entry % (1 << SHIFT) < others).all()
        total[kind].index_put_((x, y, line, entry % (1 << SHIFT)), times.float(), accumulate=True)
    partial, full = total.transpose(3, 4) if by_keys else total
    partial, full = (x.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[:, :, :nq, :n] for x in (partial, full))
    return partial * hidden(variant, scalar, i, j, n - nq) + full


def hidden(variant: Variant, scalar, i: Tensor, j: Tensor, shift: int) -> Tensor:
    """Which pairs of partial blocks are seen."""
    if variant.mask in ("later", "padding"):
        segment, rate = variant.order
        i, j = (TileOrder(segment, segment, rate).position(x % segment) for x in (i, j))
        return j <= i if variant.mask == "later" else j < scalar
    if scalar is None:
        return j <= i + shift
    apart, (reach, sinks) = i + shift - j, scalar if isinstance(scalar, tuple) else (scalar, 0)
    seen = inside(variant.mask.removesuffix(" sinks"), reach, apart) | (j < sinks)
    return seen & (apart >= 0) if variant.mask == "back sinks" else seen


def inside(window: str, reach: int, apart: Tensor) -> Tensor:
    return (apart <= reach) & (apart >= (-reach if window == "window" else 0))


def into(tokens: Tensor, order: TileOrder) -> Tensor:
    at = order.position(torch.arange(order.padded))
    return torch.where((at < order.n)[:, None, None], tokens[:, at.clamp(max=order.n - 1)], 0)


def out_of(places: Tensor, tokens: Tensor, order: TileOrder) -> None:
    tokens.copy_(places[:, order.place(torch.arange(order.n))])


def rows(grad, grad_lse, out, lse, order: TileOrder) -> tuple[Tensor, Tensor]:
    delta = (grad * out).float().sum(-1).permute(2, 0, 1)
    lse = lse.transpose(0, 1)
    if grad_lse is not None:
        delta = delta - grad_lse.transpose(0, 1).masked_fill(lse == -torch.inf, 0)
    at = order.position(torch.arange(order.padded))
    there, at = at < order.n, at.clamp(max=order.n - 1)
    lse2 = torch.where(there & (lse[..., at] > -torch.inf), lse[..., at] * LOG2E, torch.inf)
    return lse2.contiguous(), torch.where(there, delta[..., at], 0).contiguous()
