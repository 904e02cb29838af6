"""The kernels in Triton's interpreter, against the oracle; tests/gpu/test_triton.py has the same on a card."""

import copy

import pytest
import torch

from tests import tools
from workbench import BlockSparse, Dense, Dilated, PerHead, Window, attention, explain, layouts
from workbench.engines import triton_backend
from workbench.engines.torch import fused
from workbench.engines.triton import bit_masks
from workbench.patterns import tile_order

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/gpu/test_triton.py runs the kernels themselves", allow_module_level=True)

SLOW = ("longnet-64-grouped", "12-heads", "head-dim-300", "head-dim-1-", "29-tokens")
DILATED = [
    id for id in tools.TABLE if id.startswith(("dilated", "dense")) and not any(part in f"{id}-" for part in SLOW)
]
CASES = {id: tools.TABLE[id] for id in (*DILATED, "neighborhood-options", "neighborhood-2d", "neighborhood-3d")}
CASES |= {case.id: case for case in (*tools.TILED, *tools.nested(32))}
HALF = (  # of each way in which tiles are loaded, multiplied and stored; the interpreter's bfloat16 is wrong
    "dilated-uncovered-rows", "tall-blocks-head-dim-20-causal", "random-by-head", "empty-rows", "neighborhood-hilbert",
    "nested-and-others-causal", "dilated-window-sinks",
)  # fmt: skip
DAILY = [  # pairwise: ragged or not, last queries, grouped heads, batch, causal, empty rows, tile shapes, dtype
    *((id, torch.float32) for id in (
        "dense-last-9-queries", "dilated-prime-segments-causal", "dilated-partition", "wide-blocks-last-queries-causal",
        "a-layout-a-sequence-causal", "window", "nested-causal-last-queries", "nested-same-branch-thrice-causal",
        "nested-some-heads", "window-causal", "function-of-heads-causal", "several-axes",
        "another-pattern-a-head", "layouts-and-a-function",
    )),
    *((id, torch.float16) for id in HALF),
]  # fmt: skip
EACH = [(id, torch.float32) for id in CASES] + [(id, torch.float16) for id in HALF]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Nested branches run in one pass in small shapes, and in float32 too."""
    monkeypatch.setattr(tile_order, "TILE", 32)
    monkeypatch.setitem(triton_backend.ONCE, torch.float32, 64)
    monkeypatch.setattr(triton_backend, "BLOCK", 32)
    monkeypatch.setattr(triton_backend, "GRID", 32)


@pytest.mark.parametrize("of", tools.tiers(EACH, DAILY), ids=lambda of: f"{of[0]}-{tools.name_of(of[1])}")
def test_agrees_with_the_oracle(of):
    id, dtype = of
    tools.check(CASES[id], dtype, backend="triton")


def test_a_mask_that_is_off_by_one_is_noticed(monkeypatch):
    from workbench.engines.triton import block_lists as kernels

    right = kernels.mask_of

    def wrong(pattern, n, device):
        table, reach, mask = right(pattern, n, device)
        return table, reach + 1, mask

    monkeypatch.setattr(kernels, "mask_of", wrong)
    with pytest.raises(AssertionError, match="out"):
        tools.check(CASES["window"], torch.float32, backend="triton")


def test_masks_are_one_for_equal_blocks_and_are_refused_where_they_are_too_many(monkeypatch):
    """Of a window's blocks there are as many as distances from the diagonal; kept with it, as the blocks are."""
    pattern, q = Window(40, dilation=3), torch.randn(1, 320, 2, 16)
    found = bit_masks.find(pattern, 320, 1, 320, (32, 32))
    assert len(found.which) > 40 and len(found.bits) == 32 * 5
    assert bit_masks.find(pattern, 320, 1, 320, (32, 32)) is found
    monkeypatch.setattr(bit_masks, "MOST", 32 * 5 * 4 - 1)
    with pytest.raises(ValueError, match="backend='triton': the masks of the blocks of window-40-dilation-3.* 0 MiB"):
        attention(q, q, q, copy.copy(pattern), backend="triton")


def test_a_branch_that_is_left_out_is_noticed(monkeypatch):
    from workbench.engines.triton import dilated as kernels

    right = kernels.branches
    monkeypatch.setattr(kernels, "branches", lambda *x: right(*x)[:-1])
    with pytest.raises(AssertionError, match="lse"):  # which alone tells how often a key was counted
        tools.check(CASES["dilated-same-branch-thrice"], torch.float32, backend="triton")


NESTED = [64, 128], [1, 2]
PASSES = [  # pattern, n, nq, head_dim, the modules that run it
    (Dilated(*NESTED), 150, 150, 64, "block_sparse"),
    (Dilated(*NESTED), 150, 32, 64, "block_sparse"),
    (Dilated([*NESTED[0], 70], [1, 2, 3]), 150, 150, 64, "block_sparse dilated"),
    (Dilated([256, 512], [1, 8], causal=True), 1024, 1024, 64, "dilated"),  # too large a rate
    (Dilated([256, 512], [1, 8]), 1024, 1024, 64, "block_sparse"),
    (Dilated(*NESTED), 150, 31, 64, "dilated"),
    (Dilated(*NESTED), 150, 150, 65, "dilated"),
    (Dilated([64 * 1009, 64 * 1013], [1, 2]), 1 << 21, 64, 64, "dilated"),  # too long a period
    (Dense(), 150, 150, 64, "dilated"),
]


@pytest.mark.parametrize("pattern, n, nq, d, modules", PASSES, ids=str)
def test_nested_branches_run_in_one_pass(pattern, n, nq, d, modules):
    found = triton_backend.kernels(pattern, torch.zeros(()).expand(1, nq, 2, d), n)
    assert " ".join(execution.__name__.rpartition(".")[2] for execution, _ in found) == modules


REFUSED = [
    (Dense(), dict(dtype=torch.float64), "float64"),
    (Dense(), dict(dtype=torch.bfloat16), "bfloat16"),
    (Dense(), dict(d=300), "head_dim"),
    (BlockSparse(layouts.local(1), 24), {}, "multiple of 16"),
    (PerHead([Dilated([8, 16], [1, 2]), Window(3)]), {}, "counts some several times"),
]


@pytest.mark.parametrize("pattern, of, reason", REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_what_it_does_not_run_it_refuses_by_name(pattern, of, reason):
    q = torch.zeros(1, 24, 2, of.get("d", 16), dtype=of.get("dtype", torch.float32))
    tools.refused(reason, attention, q, q, q, pattern, backend="triton")


def test_auto_leaves_the_interpreter_alone():
    q = torch.zeros(1, 24, 2, 16, dtype=torch.float16)
    assert explain(q, q, q, Dilated([8], [2])).startswith("torch: ")


def test_heads_that_are_far_apart_in_memory():
    """Heads first in memory, 2^30 elements apart: the third one's offset is past int32."""
    far, n = 1 << 30, 33
    room = torch.empty(2 * far + n * 16, dtype=torch.float16)  # touched in three places only
    k = room.as_strided((1, n, 3, 16), (0, 16, far, 1))
    k.copy_(torch.randn(1, n, 3, 16))
    q, v = (torch.randn(1, n, 3, 16, dtype=torch.float16) for _ in range(2))
    for pattern in (Dilated([16, 32], [1, 2]), BlockSparse(layouts.local(1), 16)):
        want = attention(q, k.contiguous(), v, pattern, backend="triton")
        assert torch.equal(attention(q, k, v, pattern, backend="triton"), want)
        want = attention(k.contiguous(), q, v, pattern, backend="triton")
        assert torch.equal(attention(k, q, v, pattern, backend="triton"), want)


def test_the_gradient_of_lse_of_a_row_that_sees_nothing_is_left_out():
    pattern = BlockSparse(layouts.explicit(torch.tensor([[0, 1, 0, 0], [1, 1, 1, 0]]) > 0), (32, 16), causal=True)
    q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
    _, lse = attention(q, k, v, pattern, backend="triton", return_lse=True)
    both = torch.logaddexp(lse, lse)
    grads = torch.autograd.grad(both[both > -torch.inf].sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) for x in grads)


VIEWS = [
    tools.Case("residues", lambda: Dilated([16, 32], [1, 2]), 64, heads=6, head_dim=16),
    tools.Case("one-after-another", lambda: Dilated([16, 32], [4, 8]), 64, heads=4, head_dim=16),
    tools.Case("uneven", lambda: Dilated([16, 24], [3, 7]), 72, heads=8, head_dim=16),
    tools.Case("ragged-end", lambda: Dilated([16, 64], [1, 2]), 75, heads=4, head_dim=16),
    tools.Case("last-queries", lambda: Dilated([16, 32], [1, 2]), 75, nq=50, heads=4, head_dim=16),
    tools.Case("causal", lambda: Dilated([16, 32, 64], [1, 2, 5], causal=True), 72, heads=4, head_dim=16),
    tools.Case("blocked", lambda: Dilated([16, 32], [2, 4], offsets="blocked"), 64, heads=6, head_dim=16),
    tools.Case("partition", lambda: Dilated([16, 32], [2, 4], heads="partition"), 64, heads=5, head_dim=16),
    tools.Case("batch", lambda: Dilated([16, 32], [1, 2]), 64, heads=4, head_dim=16, batch=2),
    tools.Case("wider-than-a-segment", lambda: Dilated([2, 16], [4, 1]), 32, heads=4, head_dim=16),
]


@pytest.fixture
def products(monkeypatch):
    """The processor's attention instead of cuDNN's, wherever it could be taken; gives the views that were computed."""
    from workbench.engines.triton import cudnn_views

    taken = []

    def attend(q, *rest):
        taken.append(q.shape)
        return fused.forward(q, *rest)

    for name, new in {"attend": attend, "attend_backward": fused.backward, "usable": lambda *x: True}.items():
        monkeypatch.setattr(cudnn_views, name, new)
    tools.take_strided_views(monkeypatch, room=4096)
    return taken


EACH_VIEW = [(case.id, through_lse) for case in VIEWS for through_lse in (False, True)]
DAILY_VIEWS = [("residues", True), ("uneven", False), ("last-queries", True), ("causal", False), ("partition", True)]


@pytest.mark.parametrize("of", tools.tiers(EACH_VIEW, DAILY_VIEWS), ids=lambda of: of[0] + "-lse" * of[1])
def test_branches_by_fused_attention_on_strided_views(of, products):
    (case,) = (case for case in VIEWS if case.id == of[0])
    tools.check(case, torch.float32, backend="triton", through_lse=of[1])
    assert products
