"""Parts of patterns are patterns: each way of running them gives the same, and it is what the whole pattern gives."""

import pytest
import torch

import workbench as wb
from workbench import layouts
from workbench.distributed import Shards, partials, plan, views
from workbench.distributed.plans import Stage
from workbench.distributed.shards import Rows
from workbench.patterns import orderings

EDGE = layouts.local(1) | layouts.global_(1)
PATTERNS = {
    "blocks": lambda: wb.BlockSparse(EDGE, 16), "blocks-causal": lambda: wb.BlockSparse(EDGE, 16, True),
    "blocks-both-ends": lambda: wb.BlockSparse(layouts.local(1), 16),
    "blocks-wide": lambda: wb.BlockSparse(EDGE, (16, 32)),
    "blocks-tall-causal": lambda: wb.BlockSparse(EDGE, (32, 16), True),
    "blocks-by-head": lambda: wb.BlockSparse(layouts.random(0.3, 2, per_head=True), 16),
    "grid": lambda: wb.Neighborhood((10, 15), 2, orderings.hilbert((10, 15))),
    "line": lambda: wb.Neighborhood((150,), 9), "near-grid": lambda: wb.Neighborhood((30, 5), 1),
    "near-hilbert": lambda: wb.Neighborhood((3, 50), 1, orderings.hilbert((3, 50))),
    "near-line": lambda: wb.Neighborhood((150,), 4), "near-window": lambda: wb.Window(5, True, 2),
    "window": lambda: wb.Window(11, sinks=3), "predicate": lambda: wb.Predicate(lambda h, i, j: (i - j) % (h + 2) == 0),
    "predicate-causal": lambda: wb.Predicate(lambda h, i, j: i - j < 40, True),
    "dilated": lambda: wb.Dilated([150, 60, 20], [3, 2, 1]),
    "dilated-causal": lambda: wb.Dilated([150, 60, 20], [3, 2, 1], True),
    "dilated-partition": lambda: wb.Dilated([20, 30, 50], [1, 2, 3], heads="partition"),
}  # fmt: skip


CUT, WHOLE = (43, 64, 43), (64, 96, 32)  # lengths of shards; the second are whole blocks
SHARDS = [(name, CUT) for name in PATTERNS] + [(name, WHOLE) for name in PATTERNS if name.startswith("blocks")]


def positions(keys):
    return keys.positions if isinstance(keys, Rows) else torch.as_tensor(keys)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", [{}, {"offsets": "blocked"}, {"heads": "partition"}])
def test_some_heads_of_a_dilated_pattern_are_those_heads(causal, options):
    whole = wb.Dilated([8, 20, 40], [1, 2, 4], causal, **options)
    count = whole.multiplicity(40, 8)
    for first, heads in ((0, 4), (4, 4), (0 if options.get("offsets") else 5, 2)):
        part = views.some_heads(whole, first, heads, 8)
        assert torch.equal(part.multiplicity(40, heads), count[first : first + heads])
        assert part.pairs(40, heads) == int(count[first : first + heads].sum())
        assert part.divisor(heads) == whole.divisor(8)


def test_heads_inside_a_run_of_one_offset_are_no_pattern():
    whole = wb.Dilated([40], [2], offsets="blocked")
    with pytest.raises(ValueError, match="gives 4 heads in a row one offset"):
        views.some_heads(whole, 2, 2, 8)


@pytest.mark.parametrize("whole", [
    wb.BlockSparse(layouts.random(0.4, 1, per_head=True), 8),
    wb.BlockSparse(layouts.local(1), 8, True), wb.Dense(True), wb.Window(5, sinks=3),
    wb.Predicate(lambda h, i, j: (i + j) % (h + 2) == 0, True),
])  # fmt: skip
def test_some_heads_of_other_patterns(whole):
    part = views.some_heads(whole, 2, 2, 6)
    assert torch.equal(part.multiplicity(40, 2), whole.multiplicity(40, 6)[2:4])


@pytest.mark.parametrize(("name", "lengths"), SHARDS)
def test_the_partials_of_all_ranks_make_up_the_pattern(name, lengths):
    pattern, n, heads = PATTERNS[name](), sum(lengths), 4
    found = plan(pattern, Shards((lengths[0], 0, *lengths[1:])), heads, 2)
    assert found.layout.apart == (lengths is WHOLE or name.startswith("near"))
    total = torch.zeros(heads, n, n, dtype=torch.int32)
    for rank in range(4):
        for partial in partials.own_partials(found, rank).first + partials.stage_partials(found, rank, Stage(range(2))):
            first = 0
            many = sum(len(range(heads)[s.heads]) for s in partial.groups)
            m, queries = len(partial.groups[0].keys), len(partial.groups[0].queries)
            count = partial.pattern.multiplicity(m, many, queries + partial.spare)
            for group in partial.groups:
                rows, keys = torch.tensor(list(group.queries)), positions(group.keys)
                for h in range(heads)[group.heads]:
                    one = count[first, :queries]
                    if partial.overwritten is not None:
                        one[torch.isin(rows, partial.overwritten)] = 0
                    assert not one[:, keys < 0].any()
                    total[h, rows[:, None], keys[keys >= 0]] += one[:, keys >= 0]
                    first += 1
    assert torch.equal(total, pattern.multiplicity(n, heads))


def test_of_whole_blocks_only_what_arrives_is_beside_the_own_rows_and_only_for_the_queries_that_see_it():
    found = plan(wb.BlockSparse(layouts.local(1), 16), Shards((64, 160, 64)), 4)
    own, *others = partials.own_partials(found, 1).first + partials.stage_partials(found, 1, Stage(range(4)))
    assert own.groups[0].keys == own.groups[0].queries == range(64, 224)
    assert [partial.groups[0].queries for partial in others] == [range(64, 80), range(208, 224)]
    for partial in others:
        keys = partial.groups[0].keys
        assert keys[keys >= 0].tolist() == [*range(48, 64), *range(224, 240)]
