"""What needs a card is marked, and skipped where there is none; what is cheap and tells most runs first."""

import pytest
import torch

ORDER = (
    "probes", "rules", "triton", "fa4", "estimate", "allocator", "streaming", "distributed", "floors",
    "validity",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in item.nodeid:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"))
    items.sort(key=lambda x: "/gpu/" in x.nodeid and 1 + ORDER.index(x.path.stem.removeprefix("test_")))
