import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """ranks(world): processes that start with their first function, and again where one has ended."""
    living: dict[int, Ranks] = {}
    yield lambda world: living.setdefault(world, Ranks(world))
    for some in living.values():
        some.close()
