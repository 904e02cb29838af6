"""Parts of patterns are patterns: each way of running them gives the same, and it is what the whole pattern gives."""

import itertools

import pytest
import torch

import workbench as wb
from tests.distributed import work
from tests.distributed.cases import CASES
from tests.tools import TABLE
from workbench import layouts
from workbench.distributed import Shards, partials, plan, views
from workbench.distributed.plans import Stage
from workbench.distributed.shards import Rows

WHOLE = [x for x in CASES.values() if x[0].id not in TABLE and x[0].n and x[0].nq is None and not x[0].pattern().batch]


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


@pytest.mark.parametrize("case, shards", WHOLE, ids=[case.id for case, _ in WHOLE])
def test_the_partials_of_all_ranks_make_up_the_pattern(case, shards):
    pattern, n, heads = case.pattern(), case.n, case.heads
    found = work.plan_of(case, shards[4])
    assert found.layout.apart == any(x in case.id for x in ("blocks-whole", "near", "blocks-of-16", "line"))
    total = torch.zeros(heads, n, n, dtype=torch.int32)
    for rank in range(4):
        own = partials.own_partials(found, rank)
        stages = (partials.stage_partials(found, rank, x) for x in found.stages)
        for partial in itertools.chain(own.first, own.second, *own.before.values(), *stages):
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
