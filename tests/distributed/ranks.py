"""Ranks for tests: processes that stay, joined by gloo, in which functions run."""

import inspect
import pickle

from workbench.harness.ranks import Pool

LONGEST_S = 3600.0  # far above what any test takes on any machine: it ends what hangs


class Ranks:
    """`world` ranks. run(function, ...) -> what function(rank, world, ...) returned on each."""

    def __init__(self, world: int):
        self.pool = Pool(world, "gloo")

    def run(self, function, *args, **options) -> list:
        """RankError with the stack of the first rank that raised, or of one that waits in vain."""
        work = [function.__module__, function.__name__, args, options]
        return self.pool.run(f"{__name__}:on_a_rank", [pickle.dumps(work)], LONGEST_S)

    def close(self) -> None:
        self.pool.close()


def on_a_rank(work: bytes):
    import torch.distributed as dist

    from workbench.distributed import halo, partials, plans
    from workbench.harness.processes import imported

    plans.LEAST = plans.DENSE = partials.FIRST = halo.PIECE = 1  # many stages and calls, however few rows
    module, name, args, options = pickle.loads(work)
    function = imported(f"{module}:{name}")
    function = getattr(function, "on_each", function)
    return function(dist.get_rank(), dist.get_world_size(), *args, **options)


def on_ranks(world: int):
    """A test f(rank, world, ...) whose body runs, and asserts, on each of so many ranks."""

    def decorated(f):
        def test(ranks, **options):
            ranks(world).run(test, **options)

        test.__name__, test.__doc__, test.__module__, test.on_each = f.__name__, f.__doc__, f.__module__, f
        _, _, *own = inspect.signature(f).parameters.values()
        test.__signature__ = inspect.Signature([inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY), *(
            x.replace(kind=inspect.Parameter.KEYWORD_ONLY) for x in own)])  # fmt: skip
        return test

    return decorated
