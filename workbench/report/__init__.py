"""Notebooks to self-contained HTML reports: run them in order, export each, keep an index.

Only what a command line needs is imported at first; papermill, nbconvert and torch are when a report runs.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workbench.harness.narrate import duration
from workbench.report import notebooks as nbs
from workbench.report.parameters import PROFILES, settle

LIMIT_S = 1800.0  # a cell's time, unless told
MOST_BYTES = 3_000_000  # a report that can still be mailed


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of one notebook. `status`: ok, error, killed, timeout or interrupted; `failure`: why, a sentence."""

    name: str
    title: str
    status: str
    failure: str
    seconds: float
    path: Path


def run(
    notebooks: list[str | Path] | None = None, profile: str | None = None, out: str | Path | None = None,
    parameters: dict[str, object] | None = None, timeout: float = LIMIT_S,
    say=lambda text: print(text, end="", flush=True),
) -> list[Report]:  # fmt: skip
    """Run notebooks (by default all in notebooks/) one by one and write <out>/<name>.html and <out>/index.html.

    profile: tiny, quick or gpu; by default gpu where there is CUDA, else quick.
    out: a folder, by default outputs/reports/<profile>.
    parameters: override those that the notebooks declare; each goes to every notebook that declares it.
    timeout: seconds that one cell may take.
    say: takes the progress, piece by piece.
    Raises ValueError, before anything runs, for a notebook, profile or parameter that does not exist or does not fit,
    and OSError for a folder that cannot be written to.
    A notebook that fails is exported as far as it came and the next one runs; so it is on KeyboardInterrupt, which is
    raised again when the interrupted notebook and the index are written.
    """
    if profile not in (None, *PROFILES):
        raise ValueError(f"profile={profile!r}: one of {', '.join(PROFILES)}")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: a positive number of seconds")
    paths = nbs.find(notebooks)
    read = {path.stem: nbs.read(path) for path in paths}
    settle(read, profile or "quick", parameters or {})
    machine = describe()
    chosen = profile or ("quick" if machine["kind"] == "cpu" else "gpu")
    settled = settle(read, chosen, parameters or {})
    home = Path.cwd() if nbs.root() == nbs.SHARED else nbs.root()
    folder = Path(out) if out else home / "outputs" / "reports" / chosen
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # OSError, before anything runs, where nothing can be written
    origin = "" if profile else f" (by default: {'no CUDA here' if chosen == 'quick' else 'CUDA is present'})"
    say(f"profile {chosen}{origin}, on {machine['device']}\n")

    reports = []
    for number, path in enumerate(paths, 1):
        say(f"[{number}/{len(paths)}] {path.stem} ... ")
        asked = {key: value for key, value in (parameters or {}).items() if key in settled[path.stem]}
        from papermill.iorw import load_notebook_node  # a second

        from workbench.report import kernel

        begun, state = time.gmtime(), kernel.Run(load_notebook_node(str(path)))
        try:
            kernel.execute(path, settled[path.stem], timeout, state)
        finally:  # also when it is interrupted
            report = _export(state, path, chosen, asked, folder, machine, begun)
            reports.append(report)
            size = report.path.stat().st_size if report.path.exists() else 0
            note = f"  ({size / 1e6:.1f} MB: more than {MOST_BYTES / 1e6:g} MB)" if size > MOST_BYTES else ""
            why = f"  {report.failure}" if report.failure else ""
            say(f"{report.status} {duration(report.seconds)}  {os.path.relpath(report.path)}{note}{why}\n")
    return reports


def _export(state, path: Path, profile: str, asked: dict, folder: Path, machine: dict, begun) -> Report:
    """Write the page and the index. A page that cannot be made is a banner."""
    from nbformat.v4 import new_notebook

    from workbench.report import index, page  # nbconvert: a second

    title = nbs.title(state.nb, path.stem)
    byline = [
        ("device", machine["device"]),
        ("profile", profile + (f"; set by hand: {', '.join(asked)}" if asked else "")),
        ("date", time.strftime("%Y-%m-%d %H:%M UTC", begun)),
        ("commit", machine["commit"]),
        ("ran for", duration(state.seconds)),
    ]
    failure = _sentence(state) if state.status != "ok" else ""
    words = [f"-p {key} {shlex.quote(json.dumps(value))}" for key, value in asked.items()]
    facts = {
        "title": title, "status": state.status, "failure": failure, "message": state.message, "byline": byline,
        "question": state.nb.metadata.get("workbench", {}).get("question", ""), "environment": _environment(machine),
        "command": " ".join([f"python -m workbench report {path.stem} --profile {profile}", *words]),
    }  # fmt: skip
    try:
        html = page.render(state.nb, path, facts | {"cell": state.cell if failure else None})
    except Exception as error:  # whatever a cell holds that the page's makers do not expect
        state.status = "error" if state.status == "ok" else state.status
        failure = f"{failure} Its page could not be made: {type(error).__name__}: {error}.".strip()
        facts |= {"status": state.status, "failure": failure, "cell": None}
        html = page.render(new_notebook(), path, facts)
    written = folder / f"{path.stem}.html"
    index.write(written, html)
    index.refresh(folder)
    return Report(path.stem, title, state.status, failure, state.seconds, written)


def _environment(machine: dict) -> list[tuple[str, str]]:
    """What ran, for the end of the page; the load is that of the last minute, when the notebook had ended."""
    words = {"n_devices": "devices", "driver": "driver", "clock_mhz": "MHz, at most", "power_w": "W, at most"}
    words |= {"cuda": "CUDA", "torch": "torch", "triton": "triton", "fa4": "flash-attn-4"}
    known = ("device", *words, "python", "threads")
    pairs = [(words.get(key, key), str(machine[key])) for key in known if machine.get(key) is not None]
    return [*pairs, ("load at the end", f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")]


def _sentence(state) -> str:
    """Where and why a run ended: 'Timed out in cell 5 (“Speed”): over the limit of 60 s for a cell.'"""
    ends = {"error": "Failed", "killed": "Kernel died", "timeout": "Timed out", "interrupted": "Interrupted"}
    end = ends[state.status]
    if state.cell is None:
        return f"{end} before the first cell: {state.message.rstrip('.: ')}."
    cells = state.nb.cells[: state.cell + 1]
    number = sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in cells)  # as the page counts them
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    heads = [line.lstrip("#").strip() for text in prose for line in text.splitlines() if line.startswith("#")]
    first = (state.nb.cells[state.cell].source.strip().splitlines() or [""])[0]
    return f"{end} in cell {number} ({f'“{heads[-1]}”' if heads else first[:60]}): {state.message.rstrip('.: ')}."


def describe() -> dict:
    """The machine and the commit, asked of another process: this one neither imports torch nor touches a card."""
    imports = "import json; from workbench import machine, records"
    asked = f"{imports}; print(json.dumps([machine.describe(), *records.revision()]))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if done.returncode:  # no torch, say: the notebooks will tell, in a report
        return {"device": f"unknown ({done.stderr.strip().splitlines()[-1]})", "kind": "cpu", "commit": "unknown"}
    machine, commit, dirty = json.loads(done.stdout.splitlines()[-1])
    return machine | {"commit": commit[:7] + (" with changes" if dirty else "") if commit else "unknown"}
