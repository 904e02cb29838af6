"""Alternative text for figures, as an IPython extension that `workbench report` loads into its kernels.

A figure's label (`fig.set_label("...")`) is its alternative text; without one it is put together from its titles and
axis labels.
"""

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


def load_ipython_extension(ip) -> None:
    def bundle(fig, include=None, exclude=None):
        text = describe(fig)
        return {}, {"alt": text} if text else {}

    # by name: matplotlib is not imported for a notebook that does not draw
    ip.display_formatter.mimebundle_formatter.for_type_by_name("matplotlib.figure", "Figure", bundle)
