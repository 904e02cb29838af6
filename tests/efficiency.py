"""Writes workbench/fit/efficiency.json from the timings committed for a machine kind: python -m tests.efficiency."""

import json

from workbench import patterns
from workbench.fit import cards, estimate
from workbench.harness import records
from workbench.probes import roofline
from workbench.probes.case import Case


def write(kind: str = "h100x1") -> dict:
    """Write the efficiency table from the timings committed for a machine kind; returns its families."""
    card, found = cards.find(kind.rpartition("x")[0]), {}
    timed = records.committed(kind, "timing")
    usual = timed["dtype"].isin(card.matmul_tflops) & timed["median_ms"].notna()
    timed = timed[(timed["status"] == "ok") & usual]
    for _, row in timed.iterrows():
        if row.get("label") == "A/A" or row.get("graph") is True:
            continue
        case = Case(patterns.from_spec(row["pattern_spec"]), int(row["n"]), int(row["heads"]), int(row["head_dim"]),
                    row["dtype"], row["backend"], row["mode"], batch=int(row["batch"]))  # fmt: skip
        share = roofline.operations(case) / (row["median_ms"] * 1e9 * card.matmul_tflops[row["dtype"]])
        key = int(row["head_dim"]), estimate.rows(case)
        latest = found.setdefault(estimate.family(case, row["backend"], card), {}).setdefault(key, [])
        latest.append((row["run_utc"], share))
    families = {}
    for name, lines in sorted(found.items()):
        families[name] = []
        for (d, count), shares in sorted(lines.items()):
            last = max(x for x, _ in shares)
            some = sorted(share for x, share in shares if x == last)
            families[name].append({"head_dim": d, "rows": count, "share": round(some[len(some) // 2], 4)})
    table = {"card": card.key, "from": f"outputs/records/{kind}", "torch": str(timed["run_torch"].iloc[-1])}
    estimate.EFFICIENCY.write_text(json.dumps(table | {"families": families}, indent=1) + "\n")
    estimate.efficiency.cache_clear()
    return families


if __name__ == "__main__":
    write()
