"""A roofline's devices and points: each kernel and length by its operations a byte and its rate, under the ceilings."""

import pandas as pd

from workbench.fit import cards
from workbench.harness.narrate import MODES, number, title
from workbench.probes import roofline, speed

COLUMNS = ["label", "family", "backend", "mode", "n", "intensity", "tflops", "text"]


def device(rows: pd.DataFrame, ceilings: dict, suite: pd.DataFrame | None = None) -> dict:
    """{"points", "tflops", "gbs", "peak"} of one device: `points` of its sweep, and of the suite's rows that are of it.

    tflops: the ceiling of `speed.top`. gbs: the copy's. peak: the vendor's TFLOP/s of this dtype, None where no card of
    the table is it.
    """
    shown = points(rows)
    if suite is not None and len(suite):
        same = (suite["run_device"] == rows["run_device"].iloc[0]) & (suite["dtype"] == rows["dtype"].iloc[0])
        mine = suite[same & (suite["label"] != "A/A")]
        family = [spec["pattern"] for spec in mine["pattern_spec"]]
        shown = pd.concat([shown, points(mine.assign(label=mine["what"], backend=mine["who"], family=family))])
    try:
        peak = cards.find(str(rows["run_device"].iloc[0])).matmul_tflops.get(rows["dtype"].iloc[0])
    except ValueError:
        peak = None
    most = max(speed.top(rows, ceilings)[0], shown["tflops"].max())
    return {"points": shown, "tflops": most, "gbs": ceilings["copy_gbs"], "peak": peak}


def points(rows: pd.DataFrame) -> pd.DataFrame:
    """COLUMNS of the rows that ran: intensity in operations over attended pairs a byte of inputs and results."""
    done = rows[(rows["status"] == "ok") & rows["pairs"].notna()].copy()
    done["intensity"] = roofline.intensities(done)
    done["text"] = [
        f"{row.label}, {title(row.backend)}\n{MODES[row.mode]}, N = {int(row.n):,}\n{number(row.tflops)} TFLOP/s, "
        f"{number(row.intensity)} operations per byte, {number(row.median_ms)} ms"
        for row in done.itertuples()
    ]
    return done[COLUMNS].reset_index(drop=True)


def bound(device: dict) -> str:
    """Whether memory or arithmetic bounds what was measured, in a sentence."""
    ridge = 1000 * device["tflops"] / device["gbs"]
    if device["points"].empty:
        return "No row ran, so nothing lies under these ceilings."
    points = device["points"].sort_values("intensity")
    below = f"{(points['intensity'] < ridge).sum() or 'none'} of {len(points)} marks lie below that"
    least = f"the lowest, {points['label'].iloc[0]}, is at {number(points['intensity'].iloc[0])}"
    return f"From **{number(ridge)} operations per byte** on, arithmetic is the limit and not memory: {below}; {least}."


def shown(devices: dict) -> pd.DataFrame:
    """The points of all devices as a table, with the share of the device's ceiling."""
    frames = [one["points"].assign(device=name, share=one["points"]["tflops"] / one["tflops"])
              for name, one in devices.items()]  # fmt: skip
    return pd.concat(frames).rename(columns={"label": "pattern"}).set_index("pattern").drop(columns=["text", "family"])
