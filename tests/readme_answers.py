"""The answers of the README's table of notebooks, computed from the committed records."""

from workbench.analysis import frontiers, multicard, streams
from workbench.probes import speed, suite


def answers() -> dict[str, str]:
    """{notebook's number: words that its line of the README has}."""
    group = suite.recorded("h200x1").query("suite == 'neighborhood'").set_index("label")
    orders = group.loc["row_major", "median_ms"] / group.loc["hilbert", "median_ms"]

    searched = frontiers.recorded("h200x1").dropna(subset=["predicted_n", "measured_n"])
    equal = (searched["predicted_n"] == searched["measured_n"]).sum()

    rows = multicard.ok(multicard.recorded(["h200x2"])[0])
    longnet = rows[rows["kind"] == "longnet-geometric"]
    row = longnet.query("n == 1048576 and mode == 'fwd' and strategy == 'sequence'").iloc[0]

    timed = speed.recorded("h200x1")[0].query("mode == 'fwd' and n == 131072 and status == 'ok'")
    by = timed.groupby("label")["median_ms"].min()
    billion = streams.measured("h200x1").query("execution == 'layer'").nlargest(1, "n").iloc[0]
    return {
        "02": f"Hilbert is {orders:.1f} times as fast as row-major (H200, {int(group.loc['hilbert', 'n']):,} cells)",
        "03": f"{equal} of {len(searched)} predictions equal to the measurement",
        "04": f"LongNet, {int(row['n']):,} tokens on two: {row['speedup']:.2f} times",
        "05": f"LongNet, 131,072 tokens: {by['dense'] / by['dilated']:.1f} times as fast as dense",
        "08": f"{int(billion['n']):,} tokens on one card in {billion['seconds']:.1f} s, exact (H200)",
    }
