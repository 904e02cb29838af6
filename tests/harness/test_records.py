import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from tests.tools import refused
from workbench.harness import machine, records

COMMITTED = sorted(records.default_folder().glob("h*/*.jsonl"))  # of named cards; `cpu` is what this machine measured
ROOT = Path(__file__).parents[2]


def test_the_journals_and_the_code_are_the_checkouts(monkeypatch):
    """Not those of the folder that the module happens to be in: no row would be found, and other code would be new."""
    assert records.default_folder() == ROOT / "outputs" / "records" and COMMITTED
    read = []
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or b"")
    records._source()
    assert set(read) == {*(ROOT / "workbench").rglob("*.py")}


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMMIT", "0123456789abcdef")
    return records.start("timing", "quick", tmp_path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_line_comes_first_and_is_complete(recorder):
    run = lines(recorder.path)[0]
    assert set(records.RUN_FIELDS) < set(run)
    assert (run["kind"], run["schema"], run["profile"]) == ("run", 1, "quick")
    assert (run["commit"], run["dirty"]) == ("0123456789abcdef", False)
    assert run["torch"] == torch.__version__
    assert recorder.path.name.endswith("-timing-0123456.jsonl")
    assert run["utc"].startswith(recorder.path.name[:10]) and run["utc"].endswith("+00:00")


def test_no_path_and_no_host_name(tmp_path, monkeypatch):
    words = ["/home/ann/bin/run.py", "-f", "a/b/kernel-1.json", "--out=/tmp/x", "-p", '{"n": 3}']
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(socket, "gethostname", lambda: "ann-laptop")
    recorder = records.start("timing", "quick", tmp_path)
    recorder.row(status="killed", error="on ann-laptop: /usr/lib/libfoo.so: no such file, at 3 GB/s")
    run, row = lines(recorder.path)
    assert run["argv"] == ["run.py", "-f", "kernel-1.json", "--out=x", "-p", '{"n": 3}']
    assert row["error"] == "on host: libfoo.so: no such file, at 3 GB/s"


def test_rows_are_joined_with_their_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    for profile in ("quick", "gpu"):
        recorder = records.start("timing", profile, tmp_path)
        recorder.row(pattern="dense", n=8, status="ok", samples_ms=[1.0, 2.0], extra=7)
    journal = next(tmp_path.iterdir())  # of both runs
    for frame in (records.load(tmp_path), records.load(str(journal)), records.load(journal, tmp_path)):
        assert frame.run_profile.tolist() == ["quick", "gpu"]
        assert frame.samples_ms.tolist() == [[1.0, 2.0]] * 2 and frame.extra.tolist() == [7, 7]
        assert frame.measured.all() and frame.run_commit.eq("abc").all()
        assert set(records.FIELDS) <= set(frame.columns)


def test_values_become_json(recorder):
    values = {"dtype": torch.bfloat16, "n": np.int64(4), "median_ms": math.nan, "samples_ms": torch.tensor([0.5])}
    recorder.row(status="ok", shape=(2, 3), **values)
    row = lines(recorder.path)[1]
    known = {"dtype": "bfloat16", "n": 4, "median_ms": None, "samples_ms": [0.5], "shape": [2, 3]}
    assert row | known == row
    refused("status='fine'", recorder.row, status="fine")
    refused("a record holds numbers", recorder.row, status="ok", error=Path("x"))
    assert len(lines(recorder.path)) == 2


def test_half_written_last_line_is_ignored_and_does_not_spoil_the_next(recorder):
    recorder.row(n=1, status="ok")
    with open(recorder.path, "a") as journal:
        journal.write('{"kind": "row", "n": 2, "stat')
    assert records.load(recorder.path).n.tolist() == [1]
    assert not recorder.settled(n=2)
    recorder.row(n=3, status="ok")
    assert records.load(recorder.path).n.tolist() == [1, 3]
    assert recorder.settled(n=3)


def test_odd_files_load(tmp_path):
    assert len(records.load(tmp_path)) == 0
    (tmp_path / "empty.jsonl").touch()
    empty = records.load(tmp_path)
    assert len(empty) == 0 and empty[empty.probe == "timing"].median_ms.tolist() == []
    (tmp_path / "odd.jsonl").write_bytes(
        b'{"kind": "run", "run": "a", "schema": 9, "novel": [1]}\n\n[1, 2]\n12\n\xff\xfe{\n'
        b'{"kind": "row", "run": "a", "n": 1, "median_ms": NaN, "novelty": {"x": 1}}\n'
        b'{"kind": "row", "run": "lost", "n": 2}\n{"kind": "other"}\n'
    )
    frame = records.load(tmp_path)
    assert frame.n.tolist() == [1, 2] and frame.median_ms.isna().all()
    assert frame.novelty[0] == {"x": 1} and frame.run_novel[0] == [1] and pd.isna(frame.run_schema[1])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        records.load(tmp_path / "nowhere")


def test_resume_skips_what_is_settled(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    first = records.start("timing", "quick", tmp_path)
    for n, status in enumerate(records.STATUSES):
        first.row(n=n, dtype="float32", status=status)
    again = records.start("timing", "quick", tmp_path)
    assert again.path == first.path
    settled = {s for n, s in enumerate(records.STATUSES) if again.settled(n=n, dtype=torch.float32)}
    assert settled == {"ok", "oom", "refused", "unsupported"}
    assert not again.settled(n=0, dtype="float64") and not again.settled(n=0, absent=None)
    first.row(n=9, status="ok")  # by somebody else, meanwhile
    assert again.settled(n=9)


@pytest.mark.parametrize("field", ["source", "device", "torch", "driver", "triton", "fa4", "threads"])
def test_resume_does_not_trust_other_code_or_machines(recorder, field):
    recorder.row(n=1, status="ok")
    later = records.Recorder(recorder.path, "timing", recorder.run | {"run": "later"})
    other = records.Recorder(recorder.path, "timing", recorder.run | {"run": "other", field: "another"})
    assert later.settled(n=1) and not other.settled(n=1)


def test_resume_goes_on_in_the_journal_of_an_earlier_day(recorder):
    yesterday = recorder.path.with_name("2020-01-01-timing-0123456.jsonl")
    recorder.path.rename(yesterday)
    assert records.start("timing", "quick", yesterday.parent).path == yesterday


APPEND = """
import sys
from pathlib import Path
from workbench.harness.records import Recorder
recorder = Recorder(Path(sys.argv[1]), "timing", {"kind": "run", "run": sys.argv[2]})
for n in range(int(sys.argv[3])):
    recorder.row(n=n, status="ok", samples_ms=[0.25] * 500)
"""


def append(journal, name, rows):
    return subprocess.Popen([sys.executable, "-c", APPEND, str(journal), name, str(rows)], cwd=ROOT)


def test_two_processes_share_a_journal(tmp_path):
    writers = [append(tmp_path / "j.jsonl", name, 150) for name in ("a", "b")]
    assert [writer.wait(3600) for writer in writers] == [0, 0]
    assert len(lines(tmp_path / "j.jsonl")) == 302  # every line is whole
    frame = records.load(tmp_path)
    assert all(frame[frame.run == name].n.tolist() == list(range(150)) for name in ("a", "b"))


def test_a_killed_process_loses_no_row_that_was_written(tmp_path):
    journal = tmp_path / "j.jsonl"
    with append(journal, "a", 10**9) as writer:
        end = time.monotonic() + 3600
        while time.monotonic() < end and not (journal.exists() and journal.stat().st_size > 100_000):
            time.sleep(0.02)
        os.kill(writer.pid, signal.SIGKILL)
    seen = records.load(journal).n.tolist()
    assert len(seen) > 10 and seen == list(range(len(seen)))
    assert append(journal, "b", 2).wait(3600) == 0
    assert records.load(journal).n.tolist() == [*seen, 0, 1]


def test_revision(tmp_path, monkeypatch):
    monkeypatch.delenv("WORKBENCH_COMMIT", raising=False)
    monkeypatch.setattr(records, "__file__", str(tmp_path / "pkg" / "records.py"))

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "records.py").touch()
    assert records.revision() == (None, None)
    git("init")
    git("commit", "--allow-empty", "-m", "somebody else's")
    assert records.revision() == (None, None)  # a repository around an installed package says nothing about it
    git("add", ".")
    git("commit", "-m", "ours")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "new").touch()
    assert records.revision() == (commit, False)
    (tmp_path / "pkg" / "new.py").touch()
    assert records.revision() == (commit, True)
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc-dirty")
    assert records.revision() == ("abc", True)


@pytest.mark.parametrize("device, name", [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti"), ("NVIDIA GeForce RTX 4070 SUPER", "rtx4070super"), ("Tesla T4", "t4"),
])  # fmt: skip
def test_machine_kind(device, name, monkeypatch):
    assert machine.short_name(device) == name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.kind() == f"{name}x2"


def test_machine_says_no_host_and_no_path():
    described = machine.describe()
    assert json.loads(json.dumps(described)) == described
    for value in described.values():
        assert records.scrub(str(value)) == str(value)


@pytest.mark.parametrize("said, want", [
    ("570.86, 1980, 700.00\n" * 2, ["570.86", 1980, 700]), ("470.1, 1733, [N/A]\n", ["470.1", 1733, None]),
    ("NVIDIA-SMI has failed because it couldn't communicate\n", [None] * 3), ("", [None] * 3),
])  # fmt: skip
def test_what_limits_a_card_is_told_where_it_is_known(said, want, monkeypatch):
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=said))
    assert machine._limits() == dict(zip(("driver", "clock_mhz", "power_w"), want, strict=True))


@pytest.fixture
def readonly(tmp_path, monkeypatch):
    """outputs/records is where no folder can be made (root may write anywhere, so it is a file)."""
    (tmp_path / "records").write_text("")
    monkeypatch.setattr(records, "default_folder", lambda: tmp_path / "records" / "outputs")
    return tmp_path


def test_a_folder_that_is_named_is_written_or_refused(readonly, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RECORDS", str(readonly / "here"))
    records.start("timing", "quick").row(n=1, status="ok")
    assert [path.parent for path in (readonly / "here").rglob("*.jsonl")] == [readonly / "here" / machine.kind()]
    assert records.load(readonly / "here").n.tolist() == [1]
    monkeypatch.setenv("WORKBENCH_RECORDS", str(readonly / "records"))
    for folder in (None, readonly / "records" / "more"):
        with pytest.raises(ValueError, match="records.*: Not a directory; want a folder that can be written"):
            records.start("timing", "quick", folder)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_row_is_read_under_todays_names(path):
    from workbench.engines.dispatch import BACKENDS
    from workbench.probes.case import BASELINES

    frame, text = records.load(path), path.read_text()
    assert len(frame) == sum(line["kind"] == "row" for line in lines(path)) and records.scrub(text) == text
    assert set(frame.status) <= set(records.STATUSES) and frame.run_device.notna().all()
    assert (frame[(frame.probe == "timing") & (frame.status == "ok")].median_ms > 0).all()
    known = {*BACKENDS, *BASELINES, "auto", "nccl", "gloo", "torchscale", "flex", "cache"}  # the last but one was one
    assert set(frame["backend"].dropna()) <= known
    assert set(frame["asked"].dropna()) <= known


def test_old_names_are_read_as_todays():
    frame = records.load(*COMMITTED)
    windows = frame[(frame["pattern"] == "window-2048") & (frame["probe"] != "decode")]
    assert (windows["run_utc"] < "2026-11-30T17").sum() == 29  # which were called by their radius, in part
    assert (frame["backend"] == "eager").sum() == 63 and not frame["backend"].str.contains(":", na=False).any()


def test_what_a_process_reads_and_writes_is_counted(recorder, monkeypatch):
    """A page names the journals that it draws from, and of a probe's only the rows of that probe."""
    monkeypatch.setattr(records, "DRAWN", {})
    recorder.row(n=1)
    recorder.row(n=2)
    name = f"{recorder.path.parent.name}/{recorder.path.name}"
    assert sum(records.DRAWN.values()) == records.DRAWN[name] == 2
    found = records.committed("h200x2", "scaling")
    assert sum(records.DRAWN.values()) == 2 + len(found) and len(found) > 0
    records.committed("h200x2", "roofline")
    assert sum(records.DRAWN.values()) == 2 + len(found)


def test_what_is_committed_of_a_day_is_in_the_order_of_its_runs(tmp_path, monkeypatch):
    """Journals of one day are named by commits, which say nothing about time."""
    for commit, hour in (("ffff", 8), ("aaaa", 9)):
        run = {"kind": "run", "schema": 1, "run": commit, "utc": f"2026-11-30T0{hour}:00:00+00:00"}
        row = {"kind": "row", "run": commit, "probe": "streaming", "n": hour}
        path = tmp_path / "outputs" / "records" / "card" / f"2026-11-30-streaming-{commit}.jsonl"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"{json.dumps(run)}\n{json.dumps(row)}\n")
    monkeypatch.setattr(records, "SHARED", tmp_path)
    assert [*records.committed("card", "streaming")["n"]] == [8, 9]
