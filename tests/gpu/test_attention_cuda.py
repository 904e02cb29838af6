"""The table of tests/engines/test_attention.py on a CUDA card, and what only a card can get wrong."""

import pytest
import torch

from tests import tools
from tests.gpu.test_triton import LARGE  # several tiles of a kernel, with ragged ends
from workbench import BlockSparse, Dilated, attention, explain, layouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")]

CASES = tools.TABLE | {case.id: case for case in LARGE}


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_agrees_with_the_oracle(case, dtype):
    tools.check(case, dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=tools.name_of)
def test_more_segments_than_a_grid_dimension_takes(dtype):
    n = 3 * 70_000
    pattern, inputs = Dilated([3], [1]), tools.Case("", None, n, heads=1).inputs(dtype, "cuda")
    got = tools.differentiate(lambda *x: attention(*x, backend="torch", return_lse=True), inputs, pattern)
    assert all(x.isfinite().all() for x in got.values())
    for start in (0, 3 * 65_525, n - 60):  # segments are independent of each other
        part = slice(start, start + 60)
        few = [*(x[:, part] for x in inputs[:4]), inputs[4][..., part]]
        want = tools.oracle(few, pattern)
        budget = tools.budgets(pattern, few, want)
        for name, x in got.items():
            x = x[..., part] if name == "lse" else x[:, part]
            error = tools.lse_error(x, want[name]) if name == "lse" else tools.relative(x, want[name])
            assert error <= budget[name], name


def test_strided_inputs_and_upstream_gradients_give_the_same_numbers():
    case = tools.Case("strided", lambda: Dilated([64, 128], [1, 2]), 200, heads=4, head_dim=64)

    def run(q, k, v, pattern):
        views = (x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v))
        out, lse = attention(*views, pattern, backend="torch", return_lse=True)
        return out.repeat_interleave(2, -1)[..., ::2], lse  # its gradient arrives strided

    for dtype in tools.DTYPES:
        tools.check(case, dtype, device="cuda", run=run)


def test_a_forward_holds_at_most_three_times_its_output():
    q, k, v = (torch.randn(1, 131_072, 12, 64, device="cuda", dtype=torch.float32) for _ in range(3))
    with torch.no_grad():
        attention(q[:, :4096], k[:, :4096], v[:, :4096], tools.longnet(1)(), backend="torch")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v, tools.longnet(1)(), backend="torch")
    assert torch.cuda.max_memory_allocated() - before <= 3 * out.numel() * out.element_size()


def test_explain_and_auto_agree_on_a_card():
    q, k, v = tools.Case("", None, 256, head_dim=64).inputs(torch.bfloat16, "cuda")[:3]
    assert explain(q.float(), k.float(), v.float(), Dilated([64], [2])).startswith("torch: ")
    assert explain(q.float(), k.float(), v.float(), BlockSparse(layouts.local(1))).startswith("triton: ")
    assert explain(q.double(), k.double(), v.double(), BlockSparse(layouts.local(1))).startswith("torch: ")
