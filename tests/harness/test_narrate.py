import pandas as pd
import pytest

from workbench.harness.narrate import compared


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(2, 3, "**faster**"), (0.2, 0.5, "**slower**"), (0.5, 1.5, "**no different**")]
)
def test_a_speed_up_inside_the_noise_is_no_difference(low, high, verdict):
    columns = ["speedup", "speedup_low", "speedup_high"]
    times = pd.DataFrame([[1, 1, 1], [(low + high) / 2, low, high], [1, 0.9, 1.1]], ["dense", "mine", "A/A"], columns)
    said = compared(times, "mine")
    assert said.startswith(verdict) and "dense against itself 0.90 to 1.10" in said
