import pytest

from tests.distributed.ranks import Ranks

_living: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def ranks():
    """ranks(world): processes that are started once, and again where a test has ended one."""

    def of(world: int) -> Ranks:
        if world in _living and not all(x.is_alive() for x in _living[world].processes):
            _living.pop(world).close()
        return _living.setdefault(world, None) or _living.update({world: Ranks(world)}) or _living[world]

    yield of
    for some in _living.values():
        some.close()
