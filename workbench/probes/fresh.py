"""Work in a fresh process: nothing of this one's memory is in it, and whatever it does, this one lives."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile

from workbench.probes.outcome import Outcome, attempt


def run(function: str, arguments: tuple, timeout_s: float = 600.0, environment: dict | None = None) -> Outcome:
    """Call "module:function" with these arguments in a new Python; see `Outcome` for what can become of it.

    Beyond `attempt`'s statuses: timeout after timeout_s seconds, and killed where the process ends without an answer.
    environment: variables to add. ValueError where the arguments cannot be sent: a function defined in a notebook, say.
    """
    try:
        job = pickle.dumps((function, arguments))
    except Exception as error:  # pickle raises many kinds
        raise ValueError(
            f"{error}: a fresh process can be given what it can import; write the function into a module of its own "
            "and name it 'module:function'"
        ) from None
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,  # no pipe: that would not end before the last process which the work may have left behind
            env=os.environ | {"PYTHONPATH": path} | (environment or {}),
            start_new_session=True,
        ) as child,
    ):
        try:
            answer, _ = child.communicate(job, timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome("timeout", f"no answer within {timeout_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with what it has started
        said.seek(0)
        errors = said.read()
    if child.returncode == 0 and answer:
        return pickle.loads(answer)
    if child.returncode < 0:
        return Outcome("killed", f"ended by signal {-child.returncode} ({signal.Signals(-child.returncode).name})")
    lines = errors.decode(errors="replace").strip().splitlines() or ["no message"]
    return Outcome("killed", f"ended with exit code {child.returncode}: {lines[-1]}"[:400])


def main() -> None:
    die_with(int(sys.argv[1]))
    answer = os.dup(1)
    os.dup2(2, 1)  # what the work prints must not be mistaken for its answer
    outcome = attempt(_job)
    with os.fdopen(answer, "wb") as out:
        pickle.dump(outcome, out)


def _job():
    from workbench.probes.case import imported

    function, arguments = pickle.load(sys.stdin.buffer)
    return imported(function)(*arguments)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, however that ends: it may hold a card."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


if __name__ == "__main__":
    main()
