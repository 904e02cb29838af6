"""A roofline's devices and points: each kernel and length by its operations a byte and its rate, under the ceilings."""

import pandas as pd

from workbench.fit import cards
from workbench.harness.narrate import MODES, number, title
from workbench.harness.outcome import attempt
from workbench.probes import roofline, speed

COLUMNS = ["label", "family", "backend", "mode", "n", "intensity", "tflops", "measured", "text"]


def device(rows: pd.DataFrame, ceilings: dict, suite: pd.DataFrame | None = None) -> dict:
    """{"points", "tflops", "gbs", "peak"} of one device: `points` of its sweep, and of the suite's rows that are of it.

    tflops: the ceiling of `speed.top`. gbs: the copy's. peak: the vendor's TFLOP/s of this dtype, None where no card of
    the table is it.
    """
    shown, (name, dtype) = points(rows), rows[["run_device", "dtype"]].iloc[0]
    if suite is not None and len(suite):
        mine = suite[(suite["run_device"] == name) & (suite["dtype"] == dtype) & (suite["label"] != "A/A")]
        family = [spec["pattern"] for spec in mine["pattern_spec"]]
        shown = pd.concat([shown, points(mine.assign(label=mine["what"], backend=mine["who"], family=family))])
    peak = attempt(lambda: cards.find(str(name)).matmul_tflops.get(dtype)).result
    most = max(speed.top(rows, ceilings)[0], shown["tflops"].max())
    return {"points": shown, "tflops": most, "gbs": ceilings["copy_gbs"], "peak": peak}


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """COLUMNS of the rows that ran: operations over attended pairs a byte of inputs and results; the day and commit."""
    done = rows[(rows["status"] == "ok") & rows["pairs"].notna()].copy()
    done["intensity"] = roofline.intensities(done)
    done["measured"] = done["run_utc"].str[:10] + ", " + done["run_commit"].str[:7].fillna("no commit")
    done["text"] = [
        f"{row.label}, {title(row.backend)}\n{MODES[row.mode]}, N = {int(row.n):,}\n{number(row.tflops)} TFLOP/s, "
        f"{number(row.intensity)} operations per byte, {number(row.median_ms)} ms\n{row.measured}"
        for row in done.itertuples()
    ]
    return done[COLUMNS].reset_index(drop=True)


def bound(device: dict) -> str:
    """Whether memory or arithmetic bounds what was measured, in a sentence."""
    ridge, points = 1000 * device["tflops"] / device["gbs"], device["points"].sort_values("intensity")
    if points.empty:
        return "No row ran, so nothing lies under these ceilings."
    below = f"{(points['intensity'] < ridge).sum() or 'None'} of {len(points)} marks lie below that"
    least = f"the lowest, {points['label'].iloc[0]}, is at {number(points['intensity'].iloc[0])}"
    copy = f"A copy moves **{number(device['gbs'])} GB/s**, counting what is read and what is written"
    return f"{copy}: from **{number(ridge)} operations per byte** on arithmetic is the limit. {below}; {least}."


def shown(devices: dict) -> pd.DataFrame:
    """The points of all devices as a table, with the share of the device's ceiling."""
    frames = [one["points"].assign(device=name, share=one["points"]["tflops"] / one["tflops"])
              for name, one in devices.items()]  # fmt: skip
    return pd.concat(frames).rename(columns={"label": "pattern"}).set_index("pattern").drop(columns=["text", "family"])
