import pandas as pd
import pytest

from workbench.harness.narrate import compared, number, times, title


@pytest.mark.parametrize("low, high, verdict", [(2, 3, "faster"), (0.2, 0.5, "slower"), (0.5, 1.5, "not to be told")])
def test_a_speed_up_inside_the_noise_is_no_difference(low, high, verdict):
    columns = ["speedup", "speedup_low", "speedup_high"]
    times = pd.DataFrame([[1, 1, 1], [(low + high) / 2, low, high], [1, 0.9, 1.1]], ["dense", "mine", "A/A"], columns)
    said = compared(times, "mine")
    assert said.startswith((f"**{verdict}**", f"{verdict} from dense")) and "dense against itself 0.90 to 1.10" in said


@pytest.mark.parametrize(("name", "words"), [
    ("h100-pcie", "H100 PCIe"), ("longnet-geometric", "LongNet, geometric"), ("dense, cudnn", "dense, cuDNN"),
    ("dilated-4096x1-16384x2-65536x4-131072x8", "LongNet, geometric"), ("dilated-128x2", "dilated: 128 at rate 2"),
    ("random-0.90", "random blocks, 90% left out"), ("window-2048", "window of 2,048"),
    ("neighborhood-16-tiles-8x16", "neighborhood, radius 16, tiles 8 x 16"),
    ("local-19+strided-32", "blocks: local 19 + strided 32"), ("h200x2", "2 x H200"), ("a100-40gb", "A100 40 GB"),
    ("h100-nvl", "H100 NVL"), ("mi300x", "MI300X"), ("rtx2080ti", "RTX 2080 Ti"), ("what is this", "what is this"),
])  # fmt: skip
def test_an_identifier_has_words(name, words):
    assert title(name) == words


def test_a_negative_number_is_written_as_its_opposite():
    assert [number(x) for x in (1234.5, 0.1234, -1234.5, -0.1234)] == ["1,234", "0.123", "-1,234", "-0.123"]


def test_what_is_equal_is_as_much_and_not_one_times():
    said = [times(3.404), times(1.004, ".2f"), times(0.996), times(1234.5)]
    assert said == ["**3.4 times** as", "as", "**0.996 times** as", "**1,234 times** as"]
