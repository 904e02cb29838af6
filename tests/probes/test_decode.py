import re

import pytest

from workbench.harness import records
from workbench.plots import speed as draw
from workbench.probes import decode

SIZES = {"heads": 4, "head_dim": 16, "dtype": "float32", "device": "cpu"}


def test_a_sweep_records_what_a_token_takes_and_what_is_held_for_it(tmp_path):
    rows = decode.sweep(decode.lineup([32, 64], [1, 2]), [64, 256], SIZES, samples=3, folder=tmp_path)
    held = rows.set_index(["label", "n"])["held_bytes"] / (2 * 16 * 4 * 4)  # rows for each head
    assert (rows["median_ms"] > 0).all() and set(rows["nq"]) == {1} and len(records.load(tmp_path)) == 6
    assert held["dense"].to_dict() == {64: 63, 256: 255} and held["window"].to_dict() == {64: 32, 256: 32}
    assert held["dilated"].to_dict() == {64: 46.5, 256: 46.5}  # 31 of a segment, and 31 for heads that still ask
    fig = draw.decoding(rows, rows[:0])
    assert [len(ax.lines) for ax in fig.axes] == [3, 3]
    assert re.search("after 256, beside .*: dilated is .* holds 18.2% .*, window .* holds 12.5% of", decode.gain(rows))
    assert len(decode.table(records.committed("cpu-of-nobody", "decode"))) == 0


def test_a_length_too_short_to_time_is_refused(tmp_path):
    with pytest.raises(ValueError, match="length=5: want an int >= 14"):
        decode.sweep(decode.lineup([4], [1]), [5], SIZES, folder=tmp_path)
