import pytest

from tests.distributed.ranks import Ranks

_living: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def ranks():
    """ranks(world): processes that are started once, and again where a test has ended one."""

    def of(world: int) -> Ranks:
        if world in _living and not all(x.is_alive() for x in _living[world].processes):
            _living.pop(world).close()
        if world not in _living:
            _living[world] = Ranks(world)
        return _living[world]

    yield of
    for some in _living.values():
        some.close()


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """A folder on the path with the test's modules for ranks, its MODULES {file name: text}."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        for name, text in request.module.MODULES.items():
            (folder / name).write_text(text)
        patch.syspath_prepend(folder)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder
