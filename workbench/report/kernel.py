"""Running one notebook: papermill's parameters and engine, and a kernel whose end is noticed and complete."""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine
from papermill.parameterize import parameterize_notebook

from workbench.harness.records import SHARED
from workbench.report.parameters import MARK

LOG = logging.getLogger("papermill")
LAST_WORDS = 10_000  # bytes of what a kernel wrote as it died that a report keeps
KERNEL_OPTIONS = [
    "--IPKernelApp.extra_extensions=workbench.report.outputs",
    "--InlineBackend.figure_formats=svg",  # sharp on a phone and on paper
]


@dataclass
class Run:
    """One notebook on its way: filled in by the engine, complete also where the run was not."""

    nb: NotebookNode
    status: str = "ok"  # or error, killed, timeout, interrupted
    message: str = ""  # the error in one line
    cell: int | None = None  # index in nb.cells of the cell that was running
    said: int = 0  # bytes in the kernel's log as it began
    seconds: float = 0.0

    def fail(self, status: str, message: str) -> None:
        self.status, self.message = status, message


class Client(PapermillNotebookClient):
    """Papermill's client, which leaves nothing of a cell that is interrupted or over its time. loop: a cell's."""

    loop: asyncio.AbstractEventLoop | None = None

    def execute_cell(self, *args, **kw):
        try:
            return super().execute_cell(*args, **kw)
        except (KeyboardInterrupt, CellTimeoutError):
            left = asyncio.all_tasks(self.loop) if self.loop else ()  # the cell's, which would complain later
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            raise


class Engine(NBClientEngine):
    """Papermill's engine around a kernel of our own. What ends a run is noted in it, and only an interrupt raised."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, run: Run, folder: Path, limit: float, **_):
        mark = uuid.uuid4().hex
        folders = tempfile.TemporaryDirectory(prefix="wb-", ignore_cleanup_errors=True)
        with folders as scratch, open(Path(scratch, "log"), "w+b") as log:
            km = _manager(kernel_name, scratch)

            def begin(cell, cell_index: int) -> None:
                run.cell, run.said = cell_index, os.fstat(log.fileno()).st_size
                client.loop = asyncio.get_running_loop()

            options = {"km": km, "startup_timeout": 120, "extra_arguments": KERNEL_OPTIONS, "log": LOG}
            client = Client(nb_man, on_cell_execute=begin, timeout_func=lambda _: limit, **options)
            process = None
            try:
                client.start_new_kernel(env=_environment(mark, scratch), cwd=str(folder), stdout=log, stderr=log)
                process = km.provisioner.process
                client.execute(cleanup_kc=True)
                run.status = "error" if nb_man.nb.metadata.papermill.exception else "ok"
            except CellTimeoutError:
                run.fail("timeout", f"over the limit of {limit:g} s for a cell")
            except KeyboardInterrupt:
                run.fail("interrupted", "by the keyboard or a signal")
                raise
            except DeadKernelError:
                run.fail("killed", _ending(process))
                _keep_last_words(run, log)
            except Exception as error:  # a kernel that does not start, say: data like the rest
                run.fail("error", f"{type(error).__name__}: {error}".strip().splitlines()[0])
                _keep_last_words(run, log)
            finally:
                kill(mark)
                client.set_widgets_metadata()
        if run.status == "error" and not run.message:
            errors = [out for out in run.nb.cells[run.cell].outputs if out.output_type == "error"]
            run.message = f"{errors[-1].ename}: {errors[-1].evalue.strip()}".splitlines()[0] if errors else "it failed"


def execute(path: Path, parameters: dict[str, object], limit: float, run: Run) -> None:
    """Run the cells of `run`, loaded from `path`, up to the first that fails, each for at most `limit` seconds."""
    LOG.setLevel(logging.CRITICAL)  # what it would say of a failure is in the run
    if parameters:
        about = {"kernel_name": "python3", "language": "python", "comment": "Set for this run"}
        run.nb = parameterize_notebook(run.nb, parameters, **about)
    at, start = Path.cwd() if path.is_relative_to(SHARED) else path.parent, time.monotonic()
    try:
        Engine.execute_notebook(run.nb, "python3", progress_bar=False, run=run, folder=at, limit=limit)
    except OSError as error:  # no room for what a kernel needs before it starts
        run.fail("error", str(error))
    finally:
        run.seconds = time.monotonic() - start


def kill(mark: str) -> None:
    """End every process that carries this mark: the kernel, its children, and theirs, wherever they have moved to."""
    for _ in range(5):  # again, for what was born meanwhile; but not for ever, for what cannot be killed
        marked = (x for x in psutil.process_iter(["environ", "status"]) if (x.info["environ"] or {}).get(MARK) == mark)
        found = [x for x in marked if x.info["status"] != psutil.STATUS_ZOMBIE]
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)
        if not found:
            break


def _manager(kernel_name: str, scratch: str) -> AsyncKernelManager:
    """`python3` is the interpreter that runs this, whatever kernelspecs the machine has. Sockets are in a folder that
    only we can read: no ports that two reports could race for, and nothing to encrypt."""
    manager = AsyncKernelManager(kernel_name=kernel_name, kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    manager.connection_file, manager.transport = str(Path(scratch, "k")), "ipc"  # a socket's path is short
    return manager


def _environment(mark: str, scratch: str) -> dict[str, str]:
    """MARK tells `report.show` where it is; a fresh IPYTHONDIR keeps a user's start-up files out. Threads of torch that
    wait spin for a millisecond, not for ten, which a busy machine has no time for and an idle one does not notice."""
    own = {MARK: mark, "IPYTHONDIR": str(Path(scratch, "ipython"))}
    return {"GOMP_SPINCOUNT": "30000"} | os.environ | own | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def _ending(process) -> str:
    code = process.poll()
    if code is None:
        return "it stopped answering"
    if code >= 0:
        return f"it exited with code {code}"
    reason = " (the system does this where memory runs out)" if code == -signal.SIGKILL else ""
    return f"killed by signal {-code}, {signal.Signals(-code).name}{reason}"


def _keep_last_words(run: Run, log) -> None:
    """What a kernel wrote past Jupyter, a fault handler's traceback say, goes to the cell it died in."""
    log.seek(run.said)
    lines = log.read(LAST_WORDS).decode(errors="replace").strip()
    if lines and run.cell is not None:
        run.nb.cells[run.cell].outputs.append(NotebookNode(output_type="stream", name="stderr", text=lines + "\n"))
