"""The cross entropy of a vocabulary without all its logits: rows are taken in chunks, whose gradients are made at once.

Dimensions: M rows, E their width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from workbench.engines.torch import steps

LOGITS, ROWS = 1 << 26, 1 << 12  # of a chunk at most: 256 MiB in float32, and sums that float16 holds


def cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """The mean of -log softmax(x @ weight.T)[label] over the labels that are not `ignored`: a scalar.

    x (..., E), weight (V, E), labels (...). Its gradients can be taken once.
    """
    return _CrossEntropy.apply(x.flatten(0, -2), weight, labels.flatten(), ignored, torch.is_grad_enabled())


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, ignored, gradients):
        rows, wanted = min(ROWS, max(1, LOGITS // len(weight))), gradients and any(ctx.needs_input_grad)
        exact = torch.promote_types(weight.dtype, torch.float32)
        dx, dweight = (torch.zeros_like(x), torch.zeros_like(weight, dtype=exact)) if wanted else (None, None)
        kept = labels != ignored
        total, count = torch.zeros((), dtype=exact, device=x.device), kept.sum().clamp(min=1)
        for at in steps.starts(len(x), rows):
            part, keep = x[at : at + rows], kept[at : at + rows]
            logits = linear(part, weight)  # in 16 bits under autocast
            low, scores = logits.dtype, torch.log_softmax(logits.to(exact), -1)
            label = labels[at : at + rows].where(keep, 0)[:, None]
            total -= scores.gather(1, label)[:, 0].where(keep, 0).sum()
            if wanted:
                grad = scores.exp_().scatter_add_(1, label, -torch.ones_like(scores[:, :1]))
                grad = grad.mul_(keep[:, None]).to(low)  # over the count later: float16 has nothing so small
                dx[at : at + rows] = grad @ weight.to(low)
                dweight += grad.T @ part.to(low)
        ctx.save_for_backward(*((dx, dweight, count) if wanted else ()))
        ctx.dtype = weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, upstream):
        if torch.is_grad_enabled():
            raise ValueError("cross_entropy has no second derivatives: want create_graph=False")
        dx, dweight, count = ctx.saved_tensors
        by = upstream / count
        return dx.mul_(by), dweight.mul_(by).to(ctx.dtype), None, None, None
