"""A user's function as it is when a pattern is made of it: what it reads may change afterwards, its answers do not.

A copy of it reads copies: of what it closes over, of its defaults, and of the global names that it mentions; of the
functions among these in the same way, of anything else as `copy.deepcopy` makes them. What it writes to, it writes to
the copies. What modules, classes and libraries hold is read where it is, and so is what a function reads that is inside
something else (a dict, a functools.partial, a decorator), and what cannot be copied (an open file).
"""

import contextlib
import copy
import dis
import sysconfig
import types

from workbench.patterns.checks import Value

LIBRARIES = sysconfig.get_path("stdlib"), "site-packages", "dist-packages"  # where functions lie that do not change
OURS = __package__.partition(".")[0]  # whose global names do not change


def frozen(value, known: dict | None = None):
    """The copy. known: those that were made so far, by the id of what they are of, as `copy.deepcopy` takes them."""
    known = {} if known is None else known
    if isinstance(value, types.FunctionType):
        return known.get(id(value)) or _function(value, known)
    if isinstance(value, (types.ModuleType, type, Value)):
        return value
    try:
        made = copy.deepcopy(value, tried := dict(known))  # of what cannot be copied, half copies are left there
    except Exception:  # whatever an object of the user's raises when it is asked what it consists of
        return value
    known.update(tried)
    return made


def _function(value: types.FunctionType, known: dict) -> types.FunctionType:
    ours, there = str(value.__module__).partition(".")[0] == OURS, value.__globals__
    if not ours and any(x in value.__code__.co_filename for x in LIBRARIES):
        return value
    cells = tuple(types.CellType() for _ in value.__closure__ or ())
    scope = there if ours else dict(there)
    made = known[id(value)] = types.FunctionType(value.__code__, scope, value.__name__, closure=cells)
    for cell, of in zip(cells, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is not filled yet
            cell.cell_contents = frozen(of.cell_contents, known)
    made.__defaults__, made.__kwdefaults__ = (frozen(x, known) for x in (value.__defaults__, value.__kwdefaults__))
    if not ours:
        scope.update((name, frozen(there[name], known)) for name in sorted(_globals(value.__code__)) if name in there)
    vars(made).update((name, frozen(x, known)) for name, x in vars(value).items())
    return made


def _globals(code: types.CodeType) -> set[str]:
    """The global names that a function mentions, and the functions defined in it."""
    inner = [_globals(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}.union(*inner)
