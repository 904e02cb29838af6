"""What attends to what: a class for each kind of pattern, all with the methods of `Pattern`."""

import functools
import json
import zlib

from workbench.patterns import layouts
from workbench.patterns.algebra import Combined, PerHead
from workbench.patterns.base import Blocks, Pattern
from workbench.patterns.block_sparse import BlockSparse
from workbench.patterns.checks import LIVING
from workbench.patterns.dense import Dense
from workbench.patterns.dilated import Dilated
from workbench.patterns.neighborhood import Neighborhood, swin
from workbench.patterns.predicate import Predicate
from workbench.patterns.window import Window

__all__ = [
    "BlockSparse", "Blocks", "Dense", "Dilated", "Neighborhood", "Pattern", "PerHead", "Predicate", "Window",
    "from_spec", "layouts", "swin",
]  # fmt: skip


def from_spec(spec: dict) -> Pattern:
    """The pattern that `Pattern.spec` describes; ValueError where it holds a user's function or is not understood."""
    kinds = {kind.__name__: kind for kind in (Dense, Dilated, BlockSparse, Neighborhood, Predicate, Window)}
    arguments = dict(spec) if isinstance(spec, dict) else {"pattern": spec}
    name = arguments.pop("pattern", None)
    kind = kinds.get(str(name))
    try:
        if name in ("|", "&", "-", "PerHead"):
            specs = [json.dumps(x) for x in arguments.pop("of")]
            made = {x: from_spec(json.loads(x)) for x in specs}  # the same object where it is the same pattern
            of = [made[x] for x in specs]
            return PerHead(of, **arguments) if name == "PerHead" else Combined(name, of, **arguments)
        if kind is None:
            raise ValueError(f"pattern={name!r}: want one of {', '.join(kinds)}, |, &, -, PerHead")
        return getattr(kind, "from_spec", kind)(**arguments)
    except (TypeError, LookupError, zlib.error) as error:
        raise ValueError(f"spec={spec!r}: {type(error).__name__} {error}") from None


@functools.lru_cache(64)
def _of_key(key: str) -> Pattern:
    return from_spec(json.loads(key))


LIVING.made = _of_key
