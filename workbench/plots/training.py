"""Figures of models in training: DataFrames of `analysis.training` in, Figures out."""

from workbench.analysis.training import GUESS
from workbench.harness.narrate import title
from workbench.plots.style import family_color, finish, name_ends, note, subplots

STYLES = ("-", "--", ":", "-.")


def losses(rows, families: dict):
    """The loss of answers against steps and against time. families: {label: class of its pattern}."""
    fig, axes = subplots(1, 2, figsize=(10, 3.2))
    for ax, x in zip(axes, ("step", "seconds"), strict=True):
        ends = []
        for label, some in rows.groupby("label", sort=False):
            alike = [other for other in families if families[other] == families[label]]
            color, y = family_color(families[label]), some["loss"].rolling(9, min_periods=1).mean()
            ax.plot(some[x], y, color=color, linestyle=STYLES[alike.index(label) % len(STYLES)])
            ends.append((some[x].iloc[-1], y.iloc[-1], title(label), color))
        ax.axhline(GUESS, color="#767676", linewidth=0.8)
        note(ax, "a guess", (rows[x].max(), GUESS), (-4, -11), color="#767676", ha="right")
        ax.set(xlabel=x if x == "step" else "seconds of training", ylim=(0, 1.5 * GUESS), xlim=(0, rows[x].max()))
        ax.set(ylabel="loss of the answers (nats)")
        name_ends(ax, [(rows[x].max(), *end[1:]) for end in ends])
    return finish(fig, f"Two line charts of the loss of {len(families)} models: against steps, and against seconds.")
