"""Sliding-window attention, as Mistral, Longformer and StreamingLLM mean it."""

import torch

from workbench.patterns.base import Blocks, Pattern, ranges
from workbench.patterns.checks import flag, whole

CHUNK = 1 << 22  # blocks that are looked at at once


class Window(Pattern):
    """visible(h, i, j) = (i - j is a multiple m of the dilation, and m is within reach) or j < sinks; j <= i if causal.

    width: an int >= 1. causal: m from 0 to width - 1, the query's own position and those before it (Mistral's
    sliding_window, arXiv 2310.06825). Else m from -(width // 2) to width // 2: as many on either side, and itself, one
    more than an even width (Longformer, arXiv 2004.05150, whose dilation this is too).
    sinks: how many first tokens every query sees besides (StreamingLLM, arXiv 2309.17453). Any N.
    """

    same_heads = sees_itself = by_value = True

    def __init__(self, width, causal=False, dilation=1, sinks=0):
        self.width, self.causal = whole("width", width, 1), flag("causal", causal)
        self.dilation, self.sinks = whole("dilation", dilation, 1), whole("sinks", sinks, 0)

    def reach(self, n: int) -> tuple[int, int, int, int]:
        """(back, ahead, dilation, sinks): how many multiples of the dilation are seen either way, as far as there are
        n positions: none of them, nor a product of them, is larger than n."""
        step = min(self.dilation, max(1, n))
        back, ahead = (self.width - 1, 0) if self.causal else (self.width // 2, self.width // 2)
        most = max(0, n - 1) // step
        return min(back, most), min(ahead, most), step, min(self.sinks, n)

    def count(self, h, i, j, n, heads):
        back, ahead, step, sinks = self.reach(n)
        apart = i - j
        seen = (apart <= back * step) & (apart >= -ahead * step)
        if step > 1:
            seen = seen & (apart % step == 0)
        if not sinks:
            return seen
        return seen | ((j < sinks) & (apart >= 0) if self.causal else j < sinks)

    def _before(self, x: int, n: int) -> int:
        """How many (query, key) of one head have a query before position x."""
        back, ahead, step, s = self.reach(n)

        def inside(y):  # pairs of the window with a key before y
            return _steps(x, y, step, back + 1) + _steps(y, x, step, ahead + 1) - min(x, y)

        low = min(x, s)
        to_sinks = low * (low + 1) // 2 + (x - low) * s if self.causal else x * s
        return inside(n) + to_sinks - inside(s)

    def _pairs(self, n, heads, nq):
        return [self._before(n, n) - self._before(n - nq, n)] * heads

    _distinct = _pairs

    def _blocks(self, n, heads, nq, block_size):
        """Exact: of each row of blocks, those of the sinks, then those of stretches of keys that a few steps reach."""
        (bq, bk), (back, ahead, step, sinks) = block_size, self.reach(n)
        first, rows = (n - nq) // bq, -(-n // bq) if nq else 0
        if step <= bq + bk:  # one stretch of keys, in which blocks without a pair are few
            stretches = torch.tensor([[back, -ahead]])
        else:  # one for each multiple, and no block is in two
            stretches = torch.arange(back, -ahead - 1, -1)[:, None].expand(-1, 2)
        far, near = (stretches * step).unbind(1)
        chunk, parts = max(1, CHUNK // (len(far) * ((back + ahead) * step // len(far) // bk + 2) + sinks // bk)), []
        for a in range(first, rows, chunk):
            low = (torch.arange(a, min(rows, a + chunk)) * bq)[:, None]
            low, high = low.clamp(min=n - nq), (low + bq).clamp(max=n) - 1  # the queries of each row
            last = (high if self.causal else torch.full_like(high, n - 1)) // bk
            to_sinks = last.clamp(max=(sinks - 1) // bk)  # the last block of the sinks, -1 where there are none
            begin = ((low - far).clamp(min=0) // bk).clamp(min=to_sinks + 1)
            end = torch.minimum((high - near).clamp(min=-1) // bk, last)
            begin, end = torch.cat([torch.zeros_like(low), begin], 1), torch.cat([to_sinks, end], 1)
            many = (end - begin + 1).clamp(min=0)
            column, row = ranges(begin.flatten(), many.flatten()), torch.arange(len(low)).repeat_interleave(many.sum(1))
            (low, high, to_sinks), key = (x[row, 0] for x in (low, high, to_sinks)), column * bk
            stop = (key + bk).clamp(max=n) - 1
            nearest, farthest = (low - stop).clamp(min=-ahead * step), (high - key).clamp(max=back * step)
            seen = (farthest.div(step, rounding_mode="floor") * step >= nearest) | (column <= to_sinks)
            key = key.clamp(min=sinks)  # the first that is no sink
            inside = (low - stop >= -ahead * step) & (high - key <= back * step)
            if step > 1:
                inside &= (low - stop == high - key) & ((low - stop) % step == 0)
            full = (inside | (stop < sinks)) & ((stop <= low) | (not self.causal))
            parts.append((row[seen].bincount(minlength=len(many)), column[seen].int(), full[seen]))
        return Blocks.joined(block_size, n, nq, 1, parts)

    def spec(self):
        sizes = {"width": self.width, "causal": self.causal, "dilation": self.dilation, "sinks": self.sinks}
        return {"pattern": "Window"} | sizes

    @property
    def short_name(self):
        dilation = f"-dilation-{self.dilation}" * (self.dilation > 1)
        return f"window-{self.width}{dilation}" + f"-sinks-{self.sinks}" * (self.sinks > 0)


def _steps(x: int, y: int, step: int, many: int) -> int:
    """How many (i, j, m) have i = j + m * step, 0 <= i < x, 0 <= j < y, 0 <= m < many: the closed form of
    sum over m of max(0, min(y, x - m * step))."""
    whole = min(many, max(0, x - y) // step + (x > y))  # so many terms are y
    some = min(many, -(-x // step)) - whole  # and so many more are x - m * step
    if some <= 0:
        return whole * y
    return whole * y + some * (x - whole * step) - step * some * (some - 1) // 2
