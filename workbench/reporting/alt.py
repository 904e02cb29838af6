"""Alternative text for figures: a figure's label (`fig.set_label("...")`), else what its titles and axes say."""

from __future__ import annotations


def describe(fig) -> str:
    """A sentence for those who do not see the matplotlib figure; empty where it has no label, title or axis label."""
    if fig.get_label():
        return fig.get_label()
    panels = []
    for ax in fig.axes:
        axes = " against ".join(filter(None, (ax.get_ylabel(), ax.get_xlabel())))
        parts = list(filter(None, (ax.get_title() or ax.get_title("left"), axes)))
        if parts and not hasattr(ax, "_colorbar"):
            panels.append(": ".join(parts))
    return ". ".join(filter(None, [fig.get_suptitle(), *dict.fromkeys(panels)]))
