"""How exact each backend is: the rows of `workbench.probes.error.table` as a figure and as tables."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from workbench.plots import style

DTYPES = {"float64": "#000000", "float32": "#0072B2", "float16": "#D55E00", "bfloat16": "#CC79A7"}
EXACT = 1e-17  # where an error of 0 is drawn on a log axis


def figure(rows: pd.DataFrame):
    """Errors (dots) left of their budgets (bars), values and gradients, from the rows of `probes.error.table`."""
    ran = rows[rows.status == "ok"].copy()
    ran["error_grad"], ran["budget_grad"] = _worst_gradient(ran)
    lines = list(dict.fromkeys(zip(ran.pattern + np.where(ran.causal, ", causal", ""), ran.backend, strict=True)))
    fig, axes = style.subplots(1, 2, figsize=(9.4, 1.5 + 0.26 * len(lines)), sharey=True)
    for ax, what, title in zip(axes, ("out", "grad"), ("values", "gradients (worst of dq, dk, dv)"), strict=True):
        for r in ran.itertuples():
            error, budget = getattr(r, f"error_{what}"), getattr(r, f"budget_{what}")
            if np.isnan(error):
                continue
            y, color = lines.index((r.pattern + ", causal" * r.causal, r.backend)), DTYPES[r.dtype]
            ax.plot(max(error, EXACT), y, "o", ms=6, color=color if error <= budget else "red")
            ax.plot(budget, y, "|", ms=11, mew=2, color=color)
        ax.set(xscale="log", xlabel="relative error against the float64 oracle", title=title, xlim=(EXACT / 3, 1))
        style.log_ticks(ax.xaxis, _power, [EXACT, 1e-13, 1e-10, 1e-7, 1e-4, 1e-1])
    axes[0].set_yticks(range(len(lines)), [f"{pattern}  ·  {backend}" for pattern, backend in lines], fontsize=8)
    axes[0].set_ylim(len(lines) - 0.4, -0.6)
    dots = [Line2D([], [], color=DTYPES[d], marker="o", ls="", label=d) for d in DTYPES if d in set(ran.dtype)]
    bar = Line2D([], [], color="#666666", marker="|", ms=11, mew=2, ls="", label="its budget")
    fig.legend(handles=[*dots, bar], loc="outside lower center", ncols=5, fontsize=9)
    over = int((ran.worst > 1).sum())
    alt = f"Errors of {len(ran)} runs against the float64 oracle beside their budgets; {over} are over budget."
    return style.finish(fig, alt)


def _power(x: float) -> str:
    return "0" if x == EXACT else f"$10^{{{round(math.log10(x))}}}$"


def table(rows: pd.DataFrame):
    """The same rows as a pandas Styler: each error / its budget, and whether all are kept.

    Where only the gradients are refused, the values have the one row, and "refused" stands for the gradients.
    """
    half = _values_only(rows)
    rows, half = rows[~(half & (rows.status == "refused"))], half[~(half & (rows.status == "refused"))]
    rows = rows.reindex(columns=[*rows, *({"worst"} - {*rows})])
    rows["error_grad"], rows["budget_grad"] = _worst_gradient(rows)
    verdict = np.where(rows.status == "ok", np.where(rows.worst <= 1, "within", "OVER"), rows.status)
    columns = {"values": "out", "lse": "lse", "gradients": "grad"}
    shown = {title: _beside(rows, what) for title, what in columns.items()}
    shown["gradients"] = np.where(half, "refused", shown["gradients"])
    causal = np.where(rows.causal, ", causal", "")
    names = {"pattern": rows.pattern + causal, "backend": rows.backend, "dtype": rows.dtype}
    bold = lambda text: "color: #b00020; font-weight: bold" if text == "OVER" else ""  # noqa: E731
    shown = pd.DataFrame(names | shown | {"verdict": verdict})
    return _table(shown, "padding: 0.2em 0.4em").map(bold, subset=["verdict"])


def refusals(rows: pd.DataFrame):
    """Who refused what, and why, as a pandas Styler."""
    refused = rows[rows.status == "refused"]
    what = np.where(_values_only(rows)[rows.status == "refused"], "gradients", "all")
    groups = refused.assign(refuses=what).groupby(["backend", "error", "refuses"], sort=False)
    shown = groups.agg(patterns=("pattern", _listed), dtypes=("dtype", _listed)).reset_index()
    shown = shown.rename(columns={"error": "why"})[["backend", "refuses", "patterns", "dtypes", "why"]]
    return _table(shown, "white-space: normal; text-align: left")


def _values_only(rows: pd.DataFrame) -> pd.Series:
    """bool, a row each: of a case whose gradients are refused (one row) while its values ran (another)."""
    case = rows.groupby(["pattern", "causal", "backend", "dtype"]).ngroup()
    refused = (rows.status == "refused") & (rows["mode"] == "fwdbwd")
    ran = (rows.status == "ok") & (rows["mode"] == "fwd")
    return case.isin(case[refused]) & case.isin(case[ran]) & (refused | ran)


def _table(shown: pd.DataFrame, css: str):
    cells = {"selector": "td, th", "props": f"font-size: 0.8rem; {css}"}
    return shown.style.hide(axis="index").set_table_styles([cells])


def _listed(names: pd.Series) -> str:
    return ", ".join(dict.fromkeys(names))


def _beside(rows: pd.DataFrame, what: str) -> list[str]:
    """error / budget in words, empty where there is none."""
    pairs = rows.reindex(columns=[f"error_{what}", f"budget_{what}"]).to_numpy(dtype=float)
    return ["" if np.isnan(error) else f"{_short(error)} / {_short(budget)}" for error, budget in pairs]


def _short(x: float) -> str:
    """1.6e-3 for 0.0016."""
    digits, power = f"{x:.1e}".split("e")
    return f"{digits}e{int(power)}" if x else "0"


def _worst_gradient(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """(error, budget) of the gradient nearest to its budget; NaN where there is none."""
    errors, budgets = (
        rows.reindex(columns=[f"{kind}_{name}" for name in ("dq", "dk", "dv")]).to_numpy(dtype=float)
        for kind in ("error", "budget")
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        worst = np.nan_to_num(errors / budgets, nan=-1).argmax(axis=1)
    line = np.arange(len(rows))
    return pd.Series(errors[line, worst], rows.index), pd.Series(budgets[line, worst], rows.index)


def kept(rows: pd.DataFrame) -> str:
    """How many runs keep their budgets, and how much of a budget the worst uses, in a sentence."""
    ran = rows[rows["status"] == "ok"]
    if ran.empty:
        return "Nothing ran: there is no error to tell."
    inside, worst = int((ran["worst"] <= 1).sum()), ran.loc[ran["worst"].idxmax()]
    uses = f"at worst {worst['worst']:.0%} of one is used ({worst['pattern']}, {worst['backend']}, {worst['dtype']})"
    return f"**{inside:,} of {len(ran):,}** runs keep their budgets; {uses}."
