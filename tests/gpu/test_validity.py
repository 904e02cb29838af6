"""Right past 2^31 and 2^32 elements, and past 65,535 sequences: one card with 80 GB, a fresh process a call.

A fresh process, because an offset that wraps may also be an illegal access, after which a process has no card.
"""

import pytest
import torch

from workbench import Dense, Dilated, Neighborhood, explain
from workbench.engines import fa4_backend
from workbench.harness import processes
from workbench.harness.outcome import Outcome
from workbench.patterns.dilated import PAPER
from workbench.probes import validity
from workbench.probes.case import Case

CUDA = torch.cuda.is_available()
LARGE = CUDA and torch.cuda.get_device_properties(0).total_memory > 75 << 30
large = pytest.mark.skipif(not LARGE, reason="needs a card with 80 GB")

LONGNET, NESTED = Dilated(PAPER, (1, 2, 4, 6, 12)), Dilated([2048, 4096], [1, 2])
SEGMENTS = {"n": 4096, "heads": 8, "head_dim": 64, "batch": 1025}  # 2^31 elements and one sequence
TOKENS = {"n": 4_200_000, "heads": 8, "head_dim": 64}  # 0.1 % more than 2^31
TWICE = {"n": 8_400_000, "heads": 8, "head_dim": 64}  # 0.1 % more than 2^32
APART = {"n": 4_900_000, "heads": 8, "head_dim": 64}  # with the heads outside, the last one begins past 2^31
WIDE = {"n": 10_496, "heads": 4, "head_dim": 128, "batch": 400}


def window(sizes):
    return Neighborhood((sizes["n"],), 128)


PAST = {
    "dense": (Dense(), SEGMENTS, "auto", "fwd"), "dense-gradients": (Dense(), SEGMENTS, "auto", "fwdbwd"),
    "dense-causal-gradients": (Dense(True), SEGMENTS, "auto", "fwdbwd"),
    "dense-head-dim-128-gradients": (Dense(), WIDE, "auto", "fwdbwd"),
    "dense-cudnn": (Dense(), SEGMENTS, "cudnn", "fwd"), "dense-flash": (Dense(), SEGMENTS, "flash", "fwd"),
    "dense-efficient-gradients": (Dense(), SEGMENTS, "efficient", "fwdbwd"),
    "longnet": (LONGNET, TOKENS, "auto", "fwd"), "longnet-gradients": (LONGNET, TOKENS, "auto", "fwdbwd"),
    "longnet-past-2^32": (LONGNET, TWICE, "auto", "fwd"), "longnet-torch": (LONGNET, TOKENS, "torch", "fwd"),
    "longnet-torch-gradients": (LONGNET, TOKENS, "torch", "fwdbwd"),
    "window": (window(TOKENS), TOKENS, "auto", "fwd"),
    "window-gradients": (window(TOKENS), TOKENS, "auto", "fwdbwd"),
    "fa4": (NESTED, {"n": 1 << 21, "heads": 16, "head_dim": 128}, "fa4", "fwd"),
    "fa4-gradients": (NESTED, {"n": (1 << 22) + 4096, "heads": 8, "head_dim": 64}, "fa4", "fwdbwd"),
}  # fmt: skip
OUTSIDE = [(x, APART, "auto", mode) for x in (LONGNET, window(APART)) for mode in ("fwd", "fwdbwd")]
MANY = {
    "70,000-sequences": {"n": 16, "heads": 2, "head_dim": 64, "batch": 70_000},
    "20,000-sequences-of-4-heads": {"n": 16, "heads": 4, "head_dim": 64, "batch": 20_000},
}


def checked(case: Case, heads_outside: bool = False) -> tuple[str, validity.Validity]:
    """(the sentence of `explain` where the backend is 'auto', what the check finds in out or in the gradients)."""
    random, made = torch.Generator("cuda").manual_seed(0), []

    def make(shape):
        b, n, h, d = shape
        stored = (b, h, n, d) if heads_outside else shape
        x = torch.randn(stored, generator=random, device="cuda", dtype=case.dtype)
        made.append(x.transpose(1, 2) if heads_outside else x)
        return made[-1]

    call, _ = case.prepare_from(make)
    said = explain(*made[:3], case.pattern) if case.backend == "auto" else ""
    result = call()
    if case.mode == "fwd":
        return said, validity.check(case.pattern, {"out": result}, made)
    return said, validity.check(case.pattern, dict(zip(("dq", "dk", "dv"), result, strict=True)), made)


def attempted(pattern, sizes, backend, mode, dtype="bfloat16", heads_outside=False) -> Outcome:
    case = Case(pattern, dtype=dtype, backend=backend, mode=mode, device="cuda", **sizes)
    return processes.run("tests.gpu.test_validity:checked", (case, heads_outside), timeout_s=120)


def alone(*call, **options) -> tuple[str, validity.Validity]:
    outcome = attempted(*call, **options)
    assert outcome.status == "ok", outcome.error
    return outcome.result


@large
@pytest.mark.parametrize(("call", "heads_outside"), [*((x, False) for x in PAST.values()),
                                                     *((x, True) for x in OUTSIDE)],
                         ids=[*PAST, *(f"{x[0].short_name}-{x[3]}-heads-outside" for x in OUTSIDE)])  # fmt: skip
def test_right_past_2_31_elements(call, heads_outside):
    pattern, _, backend, mode = call
    if backend == "fa4" and fa4_backend.MISSING:
        pytest.skip(fa4_backend.MISSING)
    said, found = alone(*call, heads_outside=heads_outside)
    assert found.ok and found.rows > validity.RANDOM, found
    assert mode == "fwd" or found.keys > validity.RANDOM // 2, found
    assert ("by memory-efficient" in said) == (isinstance(pattern, Dense) and backend == "auto" and mode == "fwdbwd")


@large
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_torchs_fast_backwards_fail_past_2_31_elements(kernel):
    """Fails once a torch is installed in which one is right: `dispatch.gradients_past_2_31` may let it run then."""
    if not torch.__version__.startswith("2.11."):
        pytest.skip(f"known of torch 2.11, this is {torch.__version__}")
    outcome = attempted(Dense(), SEGMENTS, kernel, "fwdbwd")
    if kernel == "cudnn":
        assert not outcome.result[1].ok and outcome.result[1].errors["dq"] > 0.05, outcome
    else:
        assert outcome.status == "killed", outcome  # by an illegal memory access
    _, found = alone(Dense(), SEGMENTS | {"batch": 1024}, kernel, "fwdbwd")
    assert found.ok, found


@pytest.mark.parametrize("name, dtype", [*((x, "bfloat16") for x in MANY), *((x, "float32") for x in MANY),
                                         ("70,000-sequences", "float64")])  # fmt: skip
def test_right_past_65_535_sequences_and_heads(name, dtype):
    for mode in ("fwd", "fwdbwd"):
        _, found = alone(Dense(), MANY[name], "auto", mode, dtype)
        assert found.ok, found


@pytest.mark.parametrize("backend, dtype", [("auto", "bfloat16"), ("torch", "bfloat16"), ("torch", "float32")])
def test_right_past_65_535_segments(backend, dtype):
    _, found = alone(Dilated([64], [1]), {"n": 9_000_000, "heads": 1, "head_dim": 16}, backend, "fwdbwd", dtype)
    assert found.ok, found
