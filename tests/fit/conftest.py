from tests.distributed.conftest import ranks  # noqa: F401
