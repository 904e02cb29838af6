"""The table of tests/engines/test_attention.py on a CUDA card, and what only a card can get wrong."""

import pytest

from tests import tools
from tests.gpu.test_triton import LARGE  # several tiles of a kernel, with ragged ends
from workbench import Dilated, attention

KINDS = {}
for case in (*tools.TABLE.values(), *LARGE):
    KINDS.setdefault(type(case.pattern()).__name__, []).append(case)


@pytest.mark.parametrize("dtype", tools.DTYPES, ids=tools.name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_the_oracle(kind, dtype, subtests):
    for case in KINDS[kind]:
        with subtests.test(case.id):
            tools.check(case, dtype, device="cuda")


def test_strided_inputs_and_upstream_gradients_give_the_same_numbers():
    case = tools.Case("strided", lambda: Dilated([64, 128], [1, 2]), 200, heads=4, head_dim=64)

    def run(q, k, v, pattern):
        views = (x.repeat_interleave(2, -1)[..., ::2] for x in (q, k, v))
        out, lse = attention(*views, pattern, backend="torch", return_lse=True)
        return out.repeat_interleave(2, -1)[..., ::2], lse  # its gradient arrives strided

    for dtype in tools.DTYPES:
        tools.check(case, dtype, device="cuda", run=run)
