"""Which tests run together; and Triton's interpreter, which has to be said before kernels are defined."""

import importlib
import importlib.util
import os

import pytest
import torch

from tests import browser
from workbench.patterns import tables

# Without a CUDA card the kernels are interpreted.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # looks at it too, when a kernel is first run
    for name in ("tile_ops", "block_sparse", "dilated", "decode"):
        importlib.import_module(f"workbench.engines.triton.{name}")
    importlib.import_module("workbench.engines.fa4.places")
    del os.environ["TRITON_INTERPRET"]  # the processes that tests start are as a user's


def group_of(nodeid: str) -> str:
    """The group of a test, all of which run in one process: its file; all that use ranks, so that a pool of ranks lives
    as long as can be; or itself: a notebook that is executed, or what compiles kernels for a card."""
    path = nodeid.partition("::")[0]
    compiling = [f"gpu/test_{name}.py" for name in ("triton", "fa4", "estimate")]
    if path.endswith(("notebooks/test_reports.py", *compiling)):
        return nodeid
    alone = "test_plan.py", "test_views.py"
    ranks = any(x in path for x in ("/distributed/", "/scaling/")) and not path.endswith(alone)
    return "ranks" if ranks or path.endswith("test_ranks.py") else path


def pytest_collection_modifyitems(items):
    """Long groups begin first, so that none is left alone at the end; without a browser, its tests are skipped."""
    for item in items:
        if browser.BINARY is None and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=browser.MISSING))
    items.sort(key=lambda item: "notebooks/test_reports.py" not in item.nodeid and group_of(item.nodeid) != "ranks")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """As `--dist loadgroup`, whose groups xdist 3.8 writes where pytest 9.2 does not look for them."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    """What a test that changes the code finds out of its patterns is found by no other test's that are equal."""
    monkeypatch.setattr(tables, "EQUAL", {})


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder on the path with the module's MODULES {file name: text}, which fresh processes import."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        for name, text in request.module.MODULES.items():
            (folder / name).write_text(text)
        patch.syspath_prepend(folder)
        patch.setenv("WORKBENCH_COMMIT", "0123456789abcdef")  # what is recorded is of one commit, whatever git does
        yield folder


@pytest.fixture(scope="session")
def ranks():
    """ranks(world): processes that start with their first function, and again where one has ended."""
    from tests.distributed.ranks import Ranks

    living: dict[int, Ranks] = {}
    yield lambda world: living.setdefault(world, Ranks(world))
    for some in living.values():
        some.close()
