"""A notebook's parameters: what it declares, what it takes, and the values it runs with, checked before anything runs.

The cell tagged `parameters` declares names and defaults, and a default says of which kind a value is. What else is
asked of one stands in the notebook's metadata, beside the values that a profile sets:

    {"workbench": {"profiles": {"tiny": {"n": 32}, "quick": {}, "gpu": {"n": 4096}},
                   "parameters": {"n": {"least": 8, "multiple": 8}, "dtypes": {"choices": ["float32", "float64"]}}}}

`least`, `most` and `multiple` hold for a number and for each number of a list, `choices` for strings or numbers
likewise. `length` is a list's, or [least, most] of it. `keys` has the rules of a dict's keys, and those that it may
have beside its default's. A list is empty only where its default is, which then needs `choices`; one of several kinds
(`[128, 128, "sliding", 17]`) keeps length and order.
"""

import ast
import json
import math
import os

from workbench.report import notebooks as nbs

PROFILES = ("tiny", "quick", "gpu")
RULES = {"least", "most", "multiple", "choices", "length", "keys"}
MARK = "WORKBENCH_RUN"  # in the environment of a kernel of `workbench report`, and so of what descends from it


def declared(nb: dict, name: str = "notebook") -> dict[str, object]:
    """Parameter -> default, from the literals of the cell tagged `parameters`; ValueError where one is no literal."""
    cells, found = [cell for cell in nb["cells"] if "parameters" in cell["metadata"].get("tags", [])], {}
    try:
        statements = ast.parse(nbs.source(cells[0])).body if cells else []
    except SyntaxError as error:
        raise ValueError(f"{name}: its parameters cell is not Python ({error}); it takes `name = literal`") from None
    for statement in statements:
        try:
            (target,) = statement.targets
            found[target.id] = ast.literal_eval(statement.value)
        except (AttributeError, ValueError, TypeError):
            words = f"`{ast.unparse(statement)}` in its parameters cell, which takes `name = literal`"
            raise ValueError(f"{name}: {words}") from None
    return found


def rules(nb: dict) -> dict[str, dict]:
    """Parameter -> what its notebook's metadata asks of it beyond its kind."""
    return nb["metadata"].get("workbench", {}).get("parameters", {})


def profiles(nb: dict) -> dict[str, dict[str, object]]:
    """Profile -> the parameters that it sets."""
    return nb["metadata"].get("workbench", {}).get("profiles", {})


def kind(value: object) -> str:
    """What a parameter with this default takes: 'int', 'float', 'str', 'list of int', 'list', 'dict', ..."""
    if not isinstance(value, list | tuple):
        return type(value).__name__
    kinds = {kind(item) for item in value}
    if kinds == {"int", "float"}:
        return "list of float"
    return f"list of {kinds.pop()}" if len(kinds) == 1 else "list"


def fits(value: object, default: object, rule: dict) -> bool:
    """Whether a parameter takes a value: one of its default's kind, as its rule wants it.

    An int may stand for a float and a tuple for a list; a bool is no int.
    """
    if isinstance(default, dict):
        about = _keys(default, rule)
        known = isinstance(value, dict) and set(default) <= set(value) <= set(about)
        return known and all(fits(item, *about[key]) for key, item in value.items())
    if isinstance(default, list | tuple):
        least, most = _lengths(default, rule)
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            return False
        default, each = default or rule["choices"], {key: bound for key, bound in rule.items() if key != "length"}
        if kind(default) == "list":
            return len(value) == len(default) and all(map(fits, value, default, [each] * len(value)))
        example = max(default, key=lambda item: isinstance(item, float))
        return all(fits(item, example, each) for item in value)
    kinds = int | float if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool) and _allowed(value, rule)


def _lengths(default: list | tuple, rule: dict) -> list:
    length = rule.get("length", [min(1, len(default)), math.inf])
    return length if isinstance(length, list) else [length] * 2


def _allowed(value: object, rule: dict) -> bool:
    if "choices" in rule and isinstance(value, type(rule["choices"][0])):
        return value in rule["choices"]
    if isinstance(value, str):
        return True
    if "multiple" in rule and value % rule["multiple"]:
        return False
    least, most = rule.get("least", -math.inf), rule.get("most", math.inf)
    return least <= value <= most and abs(value) != math.inf


def _keys(default: dict, rule: dict) -> dict[str, tuple]:
    """key -> (its default or, where there is none, a value of its kind, and its rule)."""
    about = {key: {} for key in default} | rule.get("keys", {})
    examples = {key: own.get("least", own.get("choices", [None])[0]) for key, own in about.items()} | default
    return {key: (examples[key], own) for key, own in about.items()}


def wanted(default: object, rule: dict) -> str:
    """What a parameter takes, in the words of its rule: 'list of int, not empty, least 1, most 64'."""
    if isinstance(default, dict):
        return f"dict of {'; '.join(f'{key}: {wanted(*own)}' for key, own in _keys(default, rule).items())}"
    full = ["not empty"] if isinstance(default, list | tuple) and default and "length" not in rule else []
    said = [f"{key} {json.dumps(bound)}" for key, bound in rule.items()]
    return ", ".join([kind(default), *full, *said])


def settle(notebooks: dict[str, dict], profile: str, asked: dict[str, object]) -> dict[str, dict[str, object]]:
    """Notebook name -> the parameters to inject: what its profile sets, then what is asked for.

    Something asked for goes to every notebook that declares it. ValueError, naming what is declared, where none does or
    one does not take the value.
    """
    if "profile" in asked:
        raise ValueError(f"parameter profile={asked['profile']!r}: chosen with --profile {'|'.join(PROFILES)}")
    every = {name: declared(nb, name) for name, nb in notebooks.items()}
    for key, value in asked.items():
        if not any(key in own for own in every.values()):
            raise ValueError(f"parameter {key}={value!r}: no notebook here declares it. {_known(every)}")
    return {name: _settled(name, nb, every[name], profile, asked) for name, nb in notebooks.items()}


def _settled(name: str, nb: dict, own: dict, profile: str, asked: dict) -> dict[str, object]:
    if unknown := set(profiles(nb)) - set(PROFILES):
        raise ValueError(f"{name}: profiles {sorted(unknown)} in its metadata; there are {', '.join(PROFILES)}")
    for key, rule in rules(nb).items():
        if key not in own or set(rule) - RULES:
            accepted = f"want a declared name and some of {', '.join(sorted(RULES))}"
            raise ValueError(f"{name}: parameters {key}={rule!r} in its metadata: {accepted}")
    settled = {"profile": profile} if "profile" in own else {}
    mine = {key: value for key, value in asked.items() if key in own}
    for origin, values in ((f"profile {profile}:", profiles(nb).get(profile, {})), ("parameter", mine)):
        for key, value in values.items():
            if key not in own:
                raise ValueError(f"{origin} {key}={value!r} of {name}: not declared. {_known({name: own})}")
            rule = rules(nb).get(key, {})
            if not fits(value, own[key], rule):
                accepted = f"should be {wanted(own[key], rule)}, such as {own[key]!r}"
                raise ValueError(f"{origin} {key}={value!r} of {name}: {accepted}. {_known({name: own})}")
            settled[key] = value
    return settled


def _known(defaults: dict[str, dict[str, object]]) -> str:
    """What a user may set: everything but the profile, which has an option of its own."""
    own = {name: ", ".join(key for key in keys if key != "profile") or "none" for name, keys in defaults.items()}
    return "Declared: " + "; ".join(f"{name}: {keys}" for name, keys in own.items())


def apply(notebook: str, values: dict[str, object]) -> None:
    """Check the parameters of a running notebook and apply its profile: its first call, with its `globals()`.

    notebook: its name in notebooks/. values: changed in place: what is its default becomes what the profile sets, which
    is printed. ValueError, with what is taken, for a profile or a value that does not fit.
    Under `workbench report` all this is done before the kernel starts.
    """
    if MARK in os.environ:
        return
    path = nbs.find([notebook])[0]
    nb = nbs.read(path)
    own = declared(nb, path.stem)
    asked = {key: values[key] for key in own.keys() & values.keys()}
    asked = {key: x for key, x in asked.items() if type(x) is not type(own[key]) or x != own[key]}
    profile = asked.pop("profile", own.get("profile", "quick"))
    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r}: one of {', '.join(PROFILES)}")
    settled = settle({path.stem: nb}, profile, asked)[path.stem]
    values.update(settled)
    changed = [f"{key} = {value!r}" for key, value in settled.items() if key not in {"profile", *asked}]
    if changed:
        print(f"Profile {profile}: {', '.join(changed)}")
