"""Without a CUDA card the Triton kernels run in Triton's interpreter, which has to be said before they are defined."""

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    import workbench.execution.kernels.blocks
    import workbench.execution.kernels.dilated  # noqa: F401

    del os.environ["TRITON_INTERPRET"]  # the processes that tests start are as a user's
