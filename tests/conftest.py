"""Without a CUDA card the Triton kernels run in Triton's interpreter, which has to be said before they are defined."""

import importlib
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # looks at it too, when a kernel is first run
    for name in ("steps", "blocks", "dilated"):
        importlib.import_module(f"workbench.execution.kernels.{name}")
    del os.environ["TRITON_INTERPRET"]  # the processes that tests start are as a user's


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder on the path with the module's MODULES {file name: text}, which fresh processes import."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        for name, text in request.module.MODULES.items():
            (folder / name).write_text(text)
        patch.syspath_prepend(folder)
        yield folder
