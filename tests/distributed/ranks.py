"""Ranks for tests: processes that stay, joined by gloo, in which functions run."""

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

    from workbench.distributed import partials, plans
    from workbench.harness.processes import imported

    plans.LEAST = plans.PAIRS = partials.FIRST = 1  # many stages and calls, however few rows
    module, name, args, options = pickle.loads(work)
    return imported(f"{module}:{name}")(dist.get_rank(), dist.get_world_size(), *args, **options)
