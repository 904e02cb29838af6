"""What each rank did during one call: computing, packing and exchanging over time, each event under the pointer."""

import re

import pandas as pd

from workbench.explorers import Explorer
from workbench.harness.machine import short_name
from workbench.harness.narrate import title
from workbench.scaling.timeline import STAGES


def timeline(rows: pd.DataFrame, here: str) -> Explorer:
    """An explorer of the calls of `scaling.timeline.measure` that ran: a bar for each event, by rank and stage.

    here: the device of rows that are not from records."""
    calls = [_call(row, here) for row in rows[rows["status"].eq("ok")].to_dict("records")]
    return Explorer("Timeline of one call", ["timeline"], {"calls": calls, "stages": list(STAGES)})


def _call(row: dict, here: str) -> dict:
    names = sorted({event[1] for events in row["events"] for event in events})
    ranks = [
        [[STAGES.index(stage), names.index(name), round(start, 1), round(took, 1)]
         for stage, name, start, took in events]
        for events in row["events"]
    ]  # fmt: skip
    device = row.get("run_device")
    device = short_name(device).upper() if isinstance(device, str) else here
    sizes = f"N = {int(row['n']):,}, {row['dtype']}, {int(row['heads'])} heads x {int(row['head_dim'])}"
    return {
        "label": f"{title(row['label'])}, by {row['strategy']}, {device}",
        "about": f"{sizes}, {len(ranks)} ranks on {device}", "total": 1000 * row["milliseconds"],
        "names": [short(name) for name in names], "ranks": ranks,
        "rank": "card" if str(row["device"]).startswith("cuda") else "rank",
    }  # fmt: skip


def short(name: str) -> str:
    """A kernel's name without return type, namespaces and template arguments, at most 60 characters."""
    plain = re.sub(r"<.*", "", name).removeprefix("void ").split("(")[0]
    return (plain if plain.startswith(("aten::", "gloo:")) else plain.split("::")[-1])[:60]
