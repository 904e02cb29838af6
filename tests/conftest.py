"""Which tests run together; and Triton's interpreter, which has to be said before kernels are defined."""

import importlib
import importlib.util
import os

import pytest
import torch

# Without a CUDA card the kernels are interpreted.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # looks at it too, when a kernel is first run
    for name in ("steps", "blocks", "dilated"):
        importlib.import_module(f"workbench.execution.kernels.{name}")
    del os.environ["TRITON_INTERPRET"]  # the processes that tests start are as a user's


LONG = ("notebooks", "ranks")  # groups that begin first, so that none is left alone at the end


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the tests' names
def pytest_collection_modifyitems(items):
    """Give each test the group whose tests run in one process: a file or, so that a pool of ranks lives as long as can
    be, all that take the fixture `ranks`. Long groups come first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            name = "ranks" if "ranks" in item.fixturenames else str(item.path.relative_to(item.config.rootpath))
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: not _group(item).startswith(LONG))


def _group(item) -> str:
    mark = item.get_closest_marker("xdist_group")
    return mark.kwargs.get("name", *mark.args)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder on the path with the module's MODULES {file name: text}, which fresh processes import."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        for name, text in request.module.MODULES.items():
            (folder / name).write_text(text)
        patch.syspath_prepend(folder)
        yield folder
