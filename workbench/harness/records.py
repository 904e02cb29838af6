"""Records: what was measured, one JSON line a row, with where it comes from.

A journal `<date>-<probe>-<commit7>.jsonl` holds `run` lines (the machine, the versions, the commit) and `row` lines
(one measurement each, naming its run). It is only ever appended to: a line is one write, so that a killed process loses
at most its last line and several processes can share a journal.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import subprocess
import sys
import sysconfig
import uuid
from datetime import UTC, datetime
from pathlib import Path

SCHEMA = 1
RENAMED = {"workbench.frontiers:eager": "eager"}  # backends that have had another name: rows are read with today's
STATUSES = ("ok", "oom", "killed", "timeout", "refused", "unsupported")
SETTLED = ("ok", "oom", "refused", "unsupported")  # the others may have been bad luck: they are measured again
FIELDS = (
    "kind", "run", "probe", "pattern", "backend", "n", "heads", "head_dim", "dtype", "causal", "mode", "world",
    "strategy", "status", "samples_ms", "median_ms", "pairs", "peak_bytes", "extra_bytes", "measured", "error", "batch",
    "kv_heads", "nq", "seed", "pattern_spec", "asked", "suite",
)  # fmt: skip
RUN_FIELDS = (
    "schema", "device", "n_devices", "driver", "cuda", "torch", "triton", "fa4", "python", "commit", "dirty",
    "argv", "profile", "utc", "load", "processors", "clock_mhz", "power_w",
)  # fmt: skip


def start(probe: str, profile: str, folder: str | Path | None = None) -> Recorder:
    """Begin a run: append its line to the journal of this probe and commit, and return what appends the rows.

    folder: where the journal is; by default <machine kind>/ in the folder that WORKBENCH_RECORDS names, or in
    outputs/records. A journal that this commit already has for the probe is continued, so that `Recorder.settled` finds
    what an interrupted run measured. ValueError for a folder that cannot be written.
    """
    from workbench.harness import machine

    commit, dirty = revision()
    described = machine.describe()
    machine_kind = described.pop("kind")  # in a line, `kind` is what the line is
    folder = Path(folder or Path(os.environ.get(FOLDER) or default_folder()) / machine_kind)
    now = datetime.now(UTC)
    ending = f"-{probe}-{commit[:7] if commit else 'nocommit'}.jsonl"
    earlier = sorted(folder.glob(f"????-??-??{ending}"))
    argv = [scrub(re.sub(r"[^\s=]*/", "", word)) for word in sys.argv]
    run = {"kind": "run", "schema": SCHEMA, "run": uuid.uuid4().hex[:12]} | described
    run |= {"commit": commit, "dirty": dirty, "source": _source(), "argv": argv}
    run |= {"profile": profile, "utc": now.isoformat(timespec="seconds")}
    try:
        return Recorder(earlier[-1] if earlier else folder / f"{now:%Y-%m-%d}{ending}", probe, run)
    except OSError as error:
        why = f"records in {folder}: {error.strerror or error}"
        raise ValueError(f"{why}; want a folder that can be written: {FOLDER} may name one") from None


class Recorder:
    """Appends rows to a journal. `path` is the journal, `run` the run's line."""

    def __init__(self, path: Path, probe: str, run: dict):
        self.path, self.probe, self.run = path, probe, run
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(path, run)

    def row(self, **fields) -> dict:
        """Append one row, on disk when this returns; returns it as written.

        kind, run and probe are added, and `measured` True unless it is given. Tensors and numpy values become numbers
        and lists, a torch dtype its name, NaN and infinities null; `error` loses paths and the host's name.
        """
        row = {"kind": "row", "run": self.run["run"], "probe": self.probe, "measured": True} | fields
        if row.get("status", "ok") not in STATUSES:
            raise ValueError(f"status={row['status']!r}: want one of {', '.join(STATUSES)}")
        row = plain(row)
        if isinstance(row.get("error"), str):
            row["error"] = scrub(row["error"])
        append(self.path, row)
        DRAWN[_name(self.path)] = DRAWN.get(_name(self.path), 0) + 1
        return row

    def settled(self, **key) -> dict | None:
        """The last of `rows` with a settled status, None if there is none (killed and timeout are tried again)."""
        return next((row for row in reversed(self.rows(**key)) if row.get("status") in SETTLED), None)

    def rows(self, **key) -> list[dict]:
        """The journal's rows with these fields, in order, of the same code, card or processor, versions and threads
        (_SAME), whoever wrote them."""
        runs, rows = self._lines()
        same = {run.get("run") for run in runs if all(run.get(x) == self.run.get(x) for x in _SAME)}
        rows, key = [row for row in rows if row.get("run") in same], plain(key)
        return [row for row in rows if all(x in row and row[x] == value for x, value in key.items())]

    def frame(self, rows: list[dict]):
        """Rows of this journal as `load` gives them."""
        return _frame([*self._lines()[0], *rows])

    def _lines(self) -> tuple[list[dict], list[dict]]:
        """(runs, rows) that the journal has now."""
        found = [*parse(self.path.read_bytes())]
        return tuple([line for line in found if line.get("kind") == kind] for kind in ("run", "row"))


PACKAGE = Path(__file__).parents[1]  # workbench/
SHARED = Path(sysconfig.get_path("data")) / "share" / "attention-workbench"  # what a wheel brings beside the package
FOLDER = "WORKBENCH_RECORDS"  # the environment variable that names where new records go
DRAWN: dict[str, int] = {}  # journal, as machine/file -> rows of it that this process read or wrote
_SAME = ("source", "device", "driver", "cuda", "torch", "triton", "fa4", "python", "threads")


def load(*paths):
    """Rows as a pandas DataFrame, one line a row, with the fields of its run in columns run_device, run_commit, ...

    paths: journals, or folders whose journals (**/*.jsonl) are all read; by default every record of this checkout and
    of the folder that WORKBENCH_RECORDS names.
    Every field that records have by design is a column, empty where no row has it. Lines that are no JSON object (the
    half-written end of a killed run) are left out. FileNotFoundError for a path that is not there.
    """
    return _frame(_lines(_journals(paths)))


def committed(kind: str, probe: str | None = None):
    """`load` of a machine kind's journals, all rows or those of one probe, the newest last; no rows where none are."""
    folder = next((x for x in (default_folder(), SHARED / "outputs" / "records") if (x / str(kind)).is_dir()), Path())
    found = _frame(_lines(sorted((folder / str(kind)).glob("*.jsonl")), probe))
    return found.sort_values("run_utc", kind="stable", ignore_index=True)


def _lines(journals: list[Path], probe: str | None = None):
    for journal in journals:
        lines = [x for x in parse(journal.read_bytes()) if x.get("kind") != "row" or probe in (None, x.get("probe"))]
        if rows := sum(line.get("kind") == "row" for line in lines):
            DRAWN[_name(journal)] = rows
        yield from lines


def _name(journal: Path) -> str:
    return f"{journal.parent.name}/{journal.name}"


def _frame(lines):
    import pandas as pd

    runs, rows = {}, []
    for line in lines:
        if line.get("kind") == "run":
            runs[line.get("run")] = {f"run_{x}": y for x, y in line.items() if x not in ("kind", "run")}
        elif line.get("kind") == "row":
            rows.append(line)
    frame = pd.DataFrame([row | runs.get(row.get("run"), {}) for row in rows])
    columns = [*FIELDS, *(f"run_{x}" for x in RUN_FIELDS)]
    return frame.reindex(columns=[*columns, *(x for x in frame.columns if x not in columns)])


def default_folder() -> Path:
    """outputs/records of the checkout that this package is in, or of the current folder where it is in none."""
    checkout = PACKAGE.parent
    return (checkout if (checkout / "pyproject.toml").exists() else Path.cwd()) / "outputs" / "records"


def revision() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout: from git, or from WORKBENCH_COMMIT (a hash; -dirty or + behind it if it is).

    dirty: whether tracked or new files differ from the commit; outputs/ does not count. (None, None) where neither
    tells.
    """
    if given := os.environ.get("WORKBENCH_COMMIT"):
        commit = given.removesuffix("+").removesuffix("-dirty")
        return commit, commit != given
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is somebody else's repository around us
        return _git("rev-parse", "HEAD"), bool(_git("status", "--porcelain", "--", ":(top)", ":(top,exclude)outputs"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def scrub(text: str) -> str:
    """`text` with the paths in it cut to their last part and this host's name left out."""
    text = re.sub(r"(?<![\w/:.~])(?:~|\.{1,2})?(?:/[\w.@+-]+)*/([\w.@+-]+)/?", r"\1", text)
    host = socket.gethostname()
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "host", text) if host not in ("", "localhost") else text


def plain(value):
    """`value` as JSON can hold it: see `Recorder.row`."""
    if isinstance(value, dict):
        return {str(x): plain(y) for x, y in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if hasattr(value, "tolist"):  # torch and numpy, scalars too
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    name = str(value).removeprefix("torch.")
    if type(value).__name__ not in ("dtype", "device"):
        raise ValueError(f"{type(value).__name__} {name}: a record holds numbers, text, lists and dicts of them")
    return name


def append(path: Path, line: dict) -> None:
    """Append a line of JSON, which is on the disk when this returns."""
    data = json.dumps(line, allow_nan=False).encode() + b"\n"
    journal = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(journal, fcntl.LOCK_EX)  # a write becomes visible page by page: half of another's is no torn line
        size = os.fstat(journal).st_size
        if size and os.pread(journal, 1, size - 1) != b"\n":
            data = b"\n" + data  # a run that was killed in mid-line must not spoil this one
        if os.write(journal, data) != len(data):
            raise OSError(f"{path}: the line was not written whole; is the disk full?")
        os.fsync(journal)
    finally:
        os.close(journal)


def parse(data: bytes):
    """Yield the lines of a journal but for what is half-written."""
    for text in data.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            line |= {x: RENAMED[line[x]] for x in ("backend", "asked") if str(line.get(x)) in RENAMED}
            match line:  # a window has been called by its radius
                case {"pattern_spec": {"pattern": "Neighborhood", "radius": [r]}, "pattern": x} if x == f"window-{r}":
                    line["pattern"] = f"window-{2 * r}"
            yield line


def _journals(paths) -> list[Path]:
    found = {}
    for path in map(Path, paths or [default_folder(), *filter(None, [os.environ.get(FOLDER)])]):
        if not path.exists() and paths:
            raise FileNotFoundError(f"{path}: no such journal or folder")
        for journal in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path] if path.exists() else []:
            found[journal.resolve()] = journal
    return list(found.values())


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _source() -> str:
    """A fingerprint of the package's Python files: tells measurements of different code apart, committed or not."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]
