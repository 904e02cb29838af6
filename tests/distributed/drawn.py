"""What a rank runs in the tests of scaling for cases that one device cannot hold."""

from unittest.mock import patch

from workbench.distributed import api
from workbench.scaling import compare, on_ranks


def facts(rank, world, case, strategy, spoilt=False):
    """`on_ranks.facts` as if the case were too large for one device. spoilt: one number on the last rank is wrong."""
    right = api.attention

    def attention(*arguments, **named):
        out = right(*arguments, **named)
        if spoilt and rank == world - 1:
            out[0, -1, -1, 0] += 0.01
        return out

    with (
        patch.object(compare, "one_device", lambda *_: (None, "no room for it")),
        patch.object(api, "attention", attention),
    ):
        found = on_ranks.facts(case, strategy)
    return {x: found[x] for x in ("errors", "compared", "compared_with", "unchecked")}
