"""`workbench doctor`: what it prints, and what it makes of wrong and absent things."""

import pytest
import torch

from workbench import doctor
from workbench.engines import dispatch, triton_backend
from workbench.patterns import Dense
from workbench.probes import error


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch):
    """Triton's interpreter is for the tests of the kernels: here it would take a minute a report."""
    monkeypatch.setattr(triton_backend, "interpreted", lambda: False)


@pytest.fixture
def one_case(monkeypatch):
    monkeypatch.setattr(doctor, "CASES", {"dilated": doctor.CASES["dilated"]})


def test_reports_versions_and_every_backend(capsys):
    assert doctor.main() == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said
    for backend in ("reference", "torch"):
        for mode in ("forward", "backward"):
            assert f"{backend:11}{mode:10}float64, float32, bfloat16, float16: exact\n" in said


@pytest.mark.usefixtures("one_case")
def test_a_wrong_backend_is_called_wrong(monkeypatch, capsys):
    right = dispatch.attention

    def wrong(*inputs, backend, **options):
        out, lse = right(*inputs, backend=backend, **options)
        return out * (1 + 1e-5) if backend == "torch" else out, lse

    monkeypatch.setattr(dispatch, "attention", wrong)
    assert doctor.main() == 1
    said = capsys.readouterr().out
    assert "torch      forward   float64: WRONG: 1e+05 times the error allowed\n" in said
    assert "torch      forward   float32: WRONG: 5" in said
    assert "reference  forward   float64, float32, bfloat16, float16: exact\n" in said


def test_a_crash_is_an_answer(monkeypatch):
    def crash(**_):
        raise RuntimeError("no kernel image\nand more lines")

    monkeypatch.setattr(error, "of", lambda _: crash())
    said = doctor.verdict(Dense(), 8, torch.float32, "torch", "fwd", "cpu")
    assert said == "FAILED: RuntimeError: no kernel image"


@pytest.mark.usefixtures("one_case")
def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(doctor.requirements, "declared", lambda: ["no-such-package-anywhere"])
    assert doctor.main() == 1
    assert "no-such-package-anywhere is not installed" in capsys.readouterr().out
