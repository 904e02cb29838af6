"""How exact each backend is: the rows of `workbench.probes.error.table` as a figure and as tables."""

import numpy as np
import pandas as pd

from workbench.harness.narrate import listed, title
from workbench.plots import style

RESULTS = {"values": ["out"], "log-sum-exps": ["lse"], "worst of dq, dk, dv": ["dq", "dk", "dv"]}
DTYPES = {"float64": "#000000", "float32": "#0072B2", "float16": "#D55E00", "bfloat16": "#CC79A7"}
LEAST, REFUSED = 1e-4, 6.0  # where smaller shares of a budget and refusals are drawn, on a log axis


def figure(rows: pd.DataFrame):
    """Errors as shares of their budgets, a panel a result, of `probes.error.table`: right of the line at 1 is too much.
    Crosses: types that did not run."""
    line = rows.pattern.map(title) + np.where(rows.causal, ", causal", "") + "  ·  " + rows.backend.map(title)
    rows = rows.assign(line=line, **{what: _share(rows, *names) for what, names in RESULTS.items()})
    lines = list(dict.fromkeys(rows.line))
    fig, axes = style.subplots(1, 3, figsize=(9.5, 1.2 + 0.23 * len(lines)), sharey=True)
    rows = rows.assign(y=rows.line.map(lines.index))
    for ax, what in zip(axes, RESULTS, strict=True):
        ran = rows[(rows.status == "ok") & rows[what].notna()]
        for x, dtype in enumerate(DTYPES):
            of, apart = ran[ran.dtype == dtype], 0.16 * (x - 1.5)
            ax.plot(of[what].clip(lower=LEAST), of.y + apart, "o", ms=5, color=DTYPES[dtype])
            over = of[of[what] > 1]
            ax.plot(over[what], over.y + apart, "o", ms=11, mfc="none", mec="red", mew=2)
            without = rows[(rows.status != "ok") & (rows.dtype == dtype) & ~rows.line.isin(of.line)]
            ax.plot([REFUSED] * len(without), without.y + apart, "x", color=DTYPES[dtype], ms=5)
        ax.axvline(1, color="red", lw=1.2)
        style.stripes(ax, len(lines))
        ax.set(xscale="log", xlabel="error / budget", title=what, xlim=(LEAST / 2, 2 * max(REFUSED, rows[what].max())))
        style.log_ticks(ax.xaxis, lambda x: f"{x:g}" if x > LEAST else "less", [LEAST, 1e-2, 1])
    axes[0].set(yticks=range(len(lines)), yticklabels=lines, ylim=(len(lines) - 0.4, -0.6))
    looks = {x: {"color": color, "marker": "o"} for x, color in DTYPES.items() if x in set(rows.dtype)}
    absent = {"did not run": {"color": "#666666", "marker": "x"}} if (rows.status != "ok").any() else {}
    style.key(fig, looks | absent, 5)
    return style.finish(fig, "Errors of every backend, pattern and type as shares of their budgets.")


def here(rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The rows of those backends of which something ran, and why nothing of the others did, in sentences."""
    ran = (rows.status == "ok").groupby(rows.backend).transform("any")
    absent = rows[~ran].drop_duplicates("backend")
    why = absent.groupby("error", sort=False)["backend"].agg(lambda x: listed(map(title, x)))
    return rows[ran], " ".join(f"{who} did not run here: {reason}." for reason, who in why.items())


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a backend and one of all: runs, those within their budgets, what did not run, the worst in percent."""
    ran, lines = rows.status == "ok", [*rows.groupby("backend", sort=False), ("all", rows)]
    return pd.DataFrame([
        {"backend": title(backend), "runs": ran[of.index].sum(), "within": (of.worst[ran] <= 1).sum(),
         "did not run": (~ran[of.index]).sum(), "worst, % of its budget": 100 * of.worst[ran].max()}
        for backend, of in lines
    ]).set_index("backend")  # fmt: skip


def refusals(rows: pd.DataFrame) -> pd.DataFrame:
    """Who refused or failed at what, and why: at gradients alone where another row of the case has the values."""
    ran = (rows.status == "ok").groupby([rows[x] for x in ("pattern", "causal", "backend", "dtype")]).transform("any")
    refused = rows.assign(refuses=np.where(ran, "gradients", "all"))[rows.status != "ok"]
    named = {"backend": refused.backend.map(title), "patterns": refused.pattern.map(title), "types": refused.dtype}
    groups = refused.assign(**named, why=refused.get("error")).groupby(["backend", "refuses", "why"], sort=False)
    shown = groups[["patterns", "types"]].agg(lambda names: ", ".join(dict.fromkeys(names))).reset_index()
    return shown.set_index("backend")[["refuses", "patterns", "types", "why"]]


def _share(rows: pd.DataFrame, *names: str) -> pd.Series:
    """error / budget of these results, the largest of them; NaN where there is none."""
    errors, budgets = (rows.reindex(columns=[f"{kind}_{name}" for name in names]).to_numpy(dtype=float)
                       for kind in ("error", "budget"))  # fmt: skip
    return pd.DataFrame(errors / budgets, rows.index).max(axis=1)


def kept(rows: pd.DataFrame) -> str:
    """How many runs keep their budgets, and how much of a budget the worst uses, in a sentence."""
    ran = rows[rows["status"] == "ok"]
    if ran.empty:
        return "Nothing ran: there is no error to tell."
    inside, worst = int((ran["worst"] <= 1).sum()), ran.loc[ran["worst"].idxmax()]
    which = f"{title(worst['pattern'])}, {title(worst['backend'])}, {worst['dtype']}"
    return f"**{inside:,} of {len(ran):,}** runs keep their budgets; the worst uses {worst['worst']:.0%} ({which})."
