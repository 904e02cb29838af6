"""Pictures of plans: who sends how much to whom, and how evenly the work lies on the ranks."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import EngFormatter, MaxNLocator

from workbench.plots import style
from workbench.plots.patterns import family_color

CELLS = 128  # ranks that are told apart: more are summed in groups


def traffic(plans: Mapping[str, object], itemsize: int = 2, head_dim: int = 64, mode: str = "fwd"):
    """A column a plan (name -> `workbench.distributed.Plan`). Above: bytes from each rank (row) to each (column), white
    for none. Below: the pairs that each rank computes, over their mean."""
    style.use()
    many = len(plans)
    fig, axes = plt.subplots(
        2,
        many,
        figsize=(3.1 * many + 1, 4.6),
        height_ratios=(3, 1),
        squeeze=False,
        sharey="row" if many == 1 else False,
    )
    sent = {name: grouped(plan.bytes(itemsize, head_dim, mode=mode).numpy()) for name, plan in plans.items()}
    seen = np.concatenate([x[x > 0] for x in sent.values()] or [np.zeros(0)])
    norm = LogNorm(seen.min(), max(seen.max(), seen.min() * 2)) if len(seen) else None
    told = []
    for (name, plan), above, below in zip(plans.items(), *axes, strict=True):
        total = int(plan.bytes(itemsize, head_dim, mode=mode).sum())
        ends = (-0.5, plan.world - 0.5)
        shown = np.ma.masked_equal(sent[name], 0)
        image = above.imshow(
            shown, norm=norm, cmap=style.SEQUENTIAL, extent=(*ends, *ends[::-1]), interpolation="nearest"
        )
        above.set(
            title=f"{name}\n{plan.world} ranks, {EngFormatter('B', places=1)(total)}",
            xlabel="to rank",
            ylabel="from rank",
        )
        above.grid(False)
        for axis in (above.xaxis, above.yaxis, below.xaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
        share = plan.pairs.astype(float) / max(1.0, float(plan.pairs.mean()))
        color = family_color(type(plan.pattern).__name__)
        below.fill_between(np.arange(plan.world + 1) - 0.5, np.append(share, share[-1]), step="post", color=color, lw=0)
        below.axhline(1, color="#666666", lw=0.8)
        below.set(xlabel=f"rank (max / mean {plan.balance:.2f})", ylabel="pairs / mean", xlim=ends, ylim=(0, None))
        told.append(f"{name} on {plan.world} ranks moves {total:,} bytes, balance {plan.balance:.2f}")
    if norm is not None:
        fig.colorbar(image, ax=list(axes[0]), format=EngFormatter("B"), label="bytes", shrink=0.8)
    return style.finish(fig, f"Bytes between ranks and pairs a rank. {'; '.join(told)}.")


def grouped(sent: np.ndarray) -> np.ndarray:
    """(world, world) -> at most CELLS rows and columns, neighbouring ranks summed."""
    each = -(-len(sent) // CELLS)
    edges = np.arange(0, len(sent), each)
    return np.add.reduceat(np.add.reduceat(sent, edges, 0), edges, 1)
