"""What is found out about a pattern is kept with it, and found by one that is equal; see also test_frozen."""

import copy

import pytest
import torch
from torch._subclasses import FakeTensorMode

from workbench import BlockSparse, Dilated, Neighborhood, PerHead, Window, attention, layouts
from workbench.distributed import views
from workbench.fit import estimate
from workbench.patterns import orderings, tables

EQUAL = [(Window, 40, True, 1, 2), (Dilated, [8, 16], [1, 2]), (Neighborhood, (8, 8), 1)]


def made(pattern, keys) -> list[int]:
    """For which of the keys something was made, rather than found."""
    found = []
    for key in keys:
        pattern.kept("test", (key,), lambda key=key: found.append(key))
    return found


def test_several_sizes_are_kept_and_the_oldest_goes(monkeypatch):
    pattern, many = PerHead([Window(3)]), tables.SIZES
    assert made(pattern, [1, 2, 1, 2]) == [1, 2]
    assert made(pattern, [*range(1, many + 1), 1]) == [*range(3, many + 1)]
    assert made(pattern, [many + 1, 1, 2]) == [many + 1, 2]
    monkeypatch.setattr(tables, "ROOM", 100)
    for place, many in enumerate((20, 30, 30, 10)):  # 80 bytes stay, 120 do not
        pattern.kept("large", (place,), lambda many=many: (3, [torch.zeros(many)]))
    assert [*pattern._kept["large"]] == [(3,)]
    assert tables.weight(pattern.blocks(3, 1)) == 2 * 8 + 4 + 1


@pytest.mark.parametrize("kind, arguments", [(kind, x) for kind, *x in EQUAL])
def test_an_equal_pattern_finds_what_was_kept_but_no_copy_and_no_other_class(kind, arguments):
    one = kind(*arguments)
    made(one, [1])
    assert made(kind(*arguments), [1]) == []
    assert made(copy.copy(one), [1]) == made(copy.deepcopy(one), [1]) == [1]
    assert made(kind(*arguments), [2]) == [2]
    other = type(kind.__name__, (kind,), {})  # which may count something else
    assert made(other(*arguments), [1]) == made(other(*arguments), [1]) == [1]


@pytest.mark.parametrize("make", [
    lambda: BlockSparse(layouts.explicit(torch.ones(2, 2) > 0), 8),
    lambda: Neighborhood((4, 4), 1, orderings.hilbert((4, 4))),
])  # fmt: skip
def test_what_a_few_numbers_do_not_say_is_found_by_nobody_else(make):
    assert made(make(), [1]) == made(make(), [1]) == [1]


def test_branches_of_other_heads_are_others():
    whole = Dilated([8, 16], [1, 2])
    assert views.Branches(whole, (0,), 0, 4)._kept is not views.Branches(whole, (0,), 1, 4)._kept


def test_what_is_kept_of_equal_patterns_is_that_of_the_last(monkeypatch):
    for width in [*range(1, tables.SIZES + 1), 1, tables.SIZES + 1]:
        made(Window(width), [0])
    assert made(Window(1), [0]) == [] and made(Window(2), [0]) == [0] and len(tables.EQUAL) == tables.SIZES
    monkeypatch.setattr(tables, "ROOM", 100)
    Window(50).kept("large", (0,), lambda: torch.zeros(40))
    Window(51)
    assert len(tables.EQUAL) == 1


def test_a_tracer_leaves_nothing_without_contents():
    """Lists on a card that is not there would be found by a real call, and its kernels read them."""
    pattern, shared = Window(300, True), []

    def call():
        shared.append(Window(300, True)._kept is pattern._kept)
        q = torch.zeros(1, 1024, 2, 64, dtype=torch.bfloat16, device="cuda")
        return attention(q, q, q, pattern), attention(q, q, q, Window(300, True))

    first, again = (estimate.program(lambda: call, "h200").requested_bytes for _ in range(2))
    assert first == again and not any(shared)  # with its lists
    keys = [key for what in pattern._kept.values() if isinstance(what, dict) for key in what]
    assert keys and not any(("cuda:0",) in key for key in keys)


def test_fake_tensors_are_found_by_no_equal_pattern():
    with FakeTensorMode():
        pattern = Window(300)
        made(pattern, [1])
    assert made(Window(300), [1]) == [1]


def test_what_is_first_asked_for_without_versions_is_right_and_stays_right():
    """In inference mode an equal pattern finds its blocks, and makes its own order late; a layout copies its blocks."""
    q = torch.randn(1, 16, 2, 4)
    want = attention(q, q, q, Neighborhood((4, 4), 1))
    pattern = Neighborhood((4, 4), 1)
    with torch.inference_mode():
        assert torch.equal(attention(q, q, q, pattern), want)
        picked = BlockSparse(layouts.top_k(q, q, 4, 2) | layouts.local(1), 4)
        seen = attention(q, q, q, picked)
    assert torch.equal(attention(q.requires_grad_(), q, q, pattern), want)
    assert torch.equal(attention(q, q, q, picked), seen)
