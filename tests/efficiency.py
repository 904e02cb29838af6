"""Writes workbench/fit/efficiency.json from the timings committed for machine kinds: python -m tests.efficiency."""

import json

from workbench import patterns
from workbench.fit import cards, estimate
from workbench.harness import records
from workbench.probes import roofline
from workbench.probes.case import Case

KINDS = {"h100x1": None, "h200x1": "fa4"}  # cards of one peak; and the only kernel that is taken from there


def write() -> dict:
    """Write the efficiency table from the timings committed for KINDS; returns its families."""
    found, sources, families = {}, [], {}
    for kind, kernel in KINDS.items():
        card, timed = cards.find(kind.rpartition("x")[0]), records.committed(kind, "timing")
        usual = timed["dtype"].isin(card.matmul_tflops) & (timed["status"] == "ok") & (timed["label"] != "A/A")
        usual &= timed["backend"] != "torchscale"  # which has no name any more
        timed = timed[usual & ~timed["graph"].eq(True) & timed["backend"].eq(kernel or timed["backend"])]
        versions = {x: timed[f"run_{x}"].iloc[-1] for x in ("torch", kernel) if x}
        sources.append({"card": card.key, "from": f"outputs/records/{kind}", "kernel": kernel or "all"} | versions)
        for _, row in timed.iterrows():
            case = Case(patterns.from_spec(row["pattern_spec"]), int(row["n"]), int(row["heads"]), int(row["head_dim"]),
                        row["dtype"], row["backend"], row["mode"], batch=int(row["batch"]))  # fmt: skip
            share = roofline.operations(case) / (row["median_ms"] * 1e9 * card.matmul_tflops[row["dtype"]])
            key = int(row["head_dim"]), estimate.rows(case)
            latest = found.setdefault(estimate.family(case, row["backend"], card), {}).setdefault(key, [])
            latest.append((row["run_utc"], share))
    for name, lines in sorted(found.items()):
        families[name] = []
        for (d, count), shares in sorted(lines.items()):
            some = sorted(share for x, share in shares if x == max(shares)[0])
            families[name].append({"head_dim": d, "rows": count, "share": round(some[len(some) // 2], 4)})
    estimate.EFFICIENCY.write_text(json.dumps({"sources": sources, "families": families}, indent=1) + "\n")
    estimate.efficiency.cache_clear()
    return families


if __name__ == "__main__":
    write()
