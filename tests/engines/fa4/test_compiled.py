"""Every kernel compiles for Hopper where the package is installed; no card is needed."""

import os
import subprocess
import sys

import pytest

from workbench.engines import fa4_backend

PROGRAM = """
import itertools, torch
from workbench.engines.fa4 import compiled
from workbench.engines.fa4.plans import Variant

order = 2048, 16
kinds = [  # mask, band, causal, order, natural, weighed
    (None, None, False, None, False, False), (None, None, True, None, False, False),
    (None, "window", False, None, False, False), (None, "back", False, None, False, False),
    ("none", None, False, None, False, False), ("causal", None, False, None, False, False),
    ("window", None, False, None, False, False), ("back", None, False, None, False, False),
    ("window sinks", None, False, None, False, False), ("back sinks", None, False, None, False, False),
    ("none", None, False, order, True, True), ("later", None, False, order, True, True),
    ("later", None, False, order, False, True), ("padding", None, False, order, False, True),
]
for d, group in ((64, 1), (128, 4)):
    for mask, band, causal, *rest in kinds:
        variant = Variant(torch.bfloat16, d, group, causal, mask, band, *rest)
        compiled._forward(variant)
        if not band:
            compiled._backward(variant)
            compiled._convert(*compiled.conversion(variant, True))
            compiled._convert(*compiled.conversion(variant, False))
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(fa4_backend.MISSING is not None, reason=str(fa4_backend.MISSING))
def test_every_kernel_compiles_for_hopper_without_a_card(tmp_path):
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False,
        env=os.environ | target | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert found.stdout == "compiled\n", found.stderr[-2000:]
