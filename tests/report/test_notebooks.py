"""Parameters: what is declared, what a profile sets, what may be asked for."""

import json

import pytest

from tests.notebooks.build import code, write
from tests.tools import refused
from workbench.report import notebooks as nbs
from workbench.report import parameters

CELL = """
profile = "quick"
n = 512  # keys
lengths = [128, 256]
rates = [1, 0.5]
scale = 1.0
causal = False
pattern = "dilated"
shift = -3
"""
DECLARED = ["n", "lengths", "rates", "scale", "causal", "pattern", "shift"]


@pytest.fixture
def notebook(tmp_path):
    def build(cell: str = CELL, name: str = "one", **profiles):
        return nbs.read(write(tmp_path / f"{name}.ipynb", "# Title", code(cell, "parameters"), profiles=profiles))

    return build


def test_defaults_are_the_literals_of_the_parameters_cell(notebook):
    own = parameters.declared(notebook())
    assert [*own] == ["profile", *DECLARED] and (own["n"], own["lengths"], own["shift"]) == (512, [128, 256], -3)


@pytest.mark.parametrize("statement", ["n = 4 * 1024", "n = f()", "import os", "n += 1", "n = = 3", "d['n'] = 1"])
def test_a_parameters_cell_that_computes_is_refused_with_its_name(notebook, statement):
    refused("one: .*literal", parameters.declared, notebook(statement), "one")


@pytest.mark.parametrize("name, value", [
    ("n", 4096), ("lengths", [16]), ("rates", [1, 2]), ("scale", 2), ("causal", True), ("pattern", "dense"),
])  # fmt: skip
def test_a_value_of_the_declared_kind_is_passed_on_as_it_is(notebook, name, value):
    settled = parameters.settle({"one": notebook()}, "quick", {name: value})
    assert settled == {"one": {"profile": "quick", name: value}} and type(settled["one"][name]) is type(value)


@pytest.mark.parametrize("name, value", [
    ("n", "4096"), ("n", 4096.0), ("n", True), ("lengths", 16), ("lengths", []), ("lengths", [16, "32"]),
    ("lengths", [True]), ("rates", ["1"]), ("scale", False), ("causal", 1), ("pattern", 5),
])  # fmt: skip
def test_a_value_of_another_kind_is_refused_with_the_name_the_value_and_what_is_accepted(notebook, name, value):
    with pytest.raises(ValueError) as raised:
        parameters.settle({"one": notebook()}, "quick", {name: value})
    message = str(raised.value)
    assert f"{name}={value!r}" in message and "one" in message
    assert f"should be {parameters.kind(parameters.declared(notebook())[name])}" in message
    assert ", ".join(DECLARED) in message


def test_an_unknown_name_is_refused_with_the_declared_names_of_each_notebook(notebook):
    both = {"one": notebook(), "two": notebook("m = 1", "two")}
    want = f"^parameter N=4: no notebook here declares it. Declared: one: {', '.join(DECLARED)}; two: m$"
    refused(want, parameters.settle, both, "quick", {"N": 4})
    refused(r"--profile tiny\|quick\|gpu", parameters.settle, both, "quick", {"profile": "gpu"})
    assert parameters.settle(both, "tiny", {"m": 3}) == {"one": {"profile": "tiny"}, "two": {"m": 3}}


def test_a_profile_overrides_defaults_and_a_user_overrides_the_profile(notebook):
    nb = notebook(tiny={"n": 64, "lengths": [8]})
    assert parameters.settle({"one": nb}, "tiny", {}) == {"one": {"profile": "tiny", "n": 64, "lengths": [8]}}
    assert parameters.settle({"one": nb}, "tiny", {"n": 2})["one"]["n"] == 2
    assert parameters.settle({"one": nb}, "gpu", {}) == {"one": {"profile": "gpu"}}


@pytest.mark.parametrize("profiles, told", [
    ({"tiny": {"m": 1}}, "profile tiny: .* of one: not declared"),
    ({"tiny": {"n": "64"}}, "profile tiny: .* of one: should be int"),
    ({"quik": {"n": 1}}, r"one: profiles \['quik'\] in its metadata; there are tiny, quick, gpu"),
])  # fmt: skip
def test_a_profile_that_does_not_fit_its_own_notebook_or_that_nobody_can_choose_is_refused(notebook, profiles, told):
    refused(told, parameters.settle, {"one": notebook(**profiles)}, "tiny", {})


def test_notebooks_are_found_by_path_by_name_and_by_how_a_name_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = (write(tmp_path / "notebooks" / f"{name}.ipynb", "# T") for name in ("01_a", "02_b"))
    assert nbs.find() == [first, second]
    for name in ("02", "02_b", str(second), "notebooks/02_b.ipynb"):
        assert nbs.find([name]) == [second]
    refused(r"notebook='0': .*01_a, 02_b", nbs.find, ["0"])
    refused("02_b asked for twice", nbs.find, ["02", "02_b"])
    refused("take the place of the index", nbs.find, [write(tmp_path / "index.ipynb", "# T")])


@pytest.mark.parametrize("text", [
    "{}", "[1]", '{"nbformat": 4, "metadata": {}}',
    '{"nbformat": 4, "metadata": {}, "cells": [{"cell_type": "code", "metadata": {}}]}',
])  # fmt: skip
def test_what_is_no_notebook_is_refused_with_its_path(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_text(text)
    refused(r"x\.ipynb: not a notebook of format 4", nbs.read, path)


RULED = """
profile = "quick"
n = 64
rates = [1, 2]
pair = [4, 4]
rows = [[8, 8, "sliding", 3]]
mode = "fwd"
sizes = {"heads": 2, "dtype": "float32"}
some = []
flag = False
"""
RULES = {
    "n": {"least": 16, "multiple": 8}, "rates": {"least": 1, "most": 64}, 
    "pair": {"length": 2, "least": 2}, "rows": {"least": 1, "choices": ["sliding", "aligned"]},
    "mode": {"choices": ["fwd", "fwdbwd"]}, "some": {"choices": ["a", "b"]},
    "sizes": {"keys": {"heads": {"least": 1}, "dtype": {"choices": ["float32"]}, "batch": {"least": 1}}},
}  # fmt: skip


@pytest.fixture
def ruled(tmp_path, monkeypatch):
    """A folder with notebooks/01_ruled.ipynb, which is the current one; its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(parameters.MARK, raising=False)
    path = tmp_path / "notebooks" / "01_ruled.ipynb"
    return write(path, "# T", code(RULED, "parameters"), profiles={"tiny": {"n": 32}}, rules=RULES)


@pytest.mark.parametrize("asked", [
    {"n": 24}, {"rates": [64]}, {"pair": [2, 9]},
    {"rows": [[1, 2, "aligned", 3], [9, 9, "sliding", 1]]}, {"mode": "fwdbwd"},
    {"sizes": {"heads": 1, "dtype": "float32", "batch": 3}}, {"some": []}, {"some": ["b", "a"]},
], ids=str)  # fmt: skip
def test_what_a_rule_takes_is_taken(ruled, asked):
    assert parameters.settle({"01": nbs.read(ruled)}, "quick", asked)["01"] == {"profile": "quick"} | asked


@pytest.mark.parametrize("asked, wanted", [
    ({"n": 20}, "n=20 of 01: should be int, least 16, multiple 8, such as 64"), ({"n": 8}, "least 16"),
    ({"rates": [0, 1]}, "list of int, not empty, least 1, most 64"), ({"rates": [10**400, 1]}, "least 1, most 64"),
    ({"rates": []}, "not empty"),
    ({"pair": [2]}, "list of int, least 2, length 2"),
    ({"rows": [[1, 2, "round", 3]]}, 'choices ."sliding", "aligned"'),
    ({"rows": [[1, 2, 3, "sliding"]]}, "list of list"), ({"rows": [[1, 2, "sliding"]]}, "list of list"),
    ({"mode": "bwd"}, 'mode=\'bwd\' of 01: should be str, choices ."fwd", "fwdbwd"'),
    ({"some": ["a", "c"]}, 'some=.* of 01: should be list, choices ."a", "b"'), ({"some": [1]}, "should be list"),
    ({"sizes": {"heads": 1}}, 'dict of heads: int, least 1; dtype: str, choices ."float32".; batch: int'),
    ({"sizes": {"heads": 0, "dtype": "float32"}}, "heads: int, least 1"),
    ({"sizes": {"heads": 1, "dtype": "float32", "head": 1}}, "dict of heads"), ({"sizes": [1]}, "dict of heads"),
], ids=str)  # fmt: skip
def test_what_a_rule_does_not_take_is_refused_with_what_it_takes(ruled, asked, wanted):
    refused(wanted, parameters.settle, {"01": nbs.read(ruled)}, "quick", asked)


@pytest.mark.parametrize("rules", [{"m": {"least": 1}}, {"n": {"lest": 1}}])
def test_a_rule_that_means_nothing_is_refused(ruled, rules):
    nb = nbs.read(ruled)
    nb["metadata"]["workbench"]["parameters"] = rules
    refused("in its metadata: want a declared name and some of choices", parameters.settle, {"01": nb}, "quick", {})


def running(**changed) -> dict:
    """The globals of a kernel in which the parameters cell has run."""
    values = {}
    exec(RULED, values)
    return values | changed


def test_a_running_notebook_gets_what_its_profile_sets_and_says_so(ruled, capsys):
    values = running(profile="tiny", mode="fwdbwd")
    parameters.apply("01_ruled", values)
    assert (values["n"], values["mode"], values["rates"]) == (32, "fwdbwd", [1, 2])
    assert capsys.readouterr().out == "Profile tiny: n = 32\n"
    parameters.apply("01_ruled", values)
    assert values["n"] == 32


def test_what_a_reader_set_stays(ruled, capsys):
    values = running(profile="tiny", n=128, rates=[1, 3])
    parameters.apply("01_ruled", values)
    assert (values["n"], values["rates"]) == (128, [1, 3]) and capsys.readouterr().out == ""


@pytest.mark.parametrize("changed, message", [
    ({"profile": "huge"}, "profile='huge': one of tiny, quick, gpu"),
    ({"rates": "1, 3"}, "rates='1, 3' of 01_ruled: should be list of int"), ({"n": 64.0}, "n=64.0 .* should be int"),
], ids=str)  # fmt: skip
def test_a_running_notebook_refuses_what_it_does_not_take(ruled, changed, message):
    refused(message, parameters.apply, "01_ruled", running(**changed))


def test_under_a_report_the_parameters_are_settled_already(ruled, monkeypatch):
    monkeypatch.setenv(parameters.MARK, "1")
    values = running(profile="tiny")
    parameters.apply("01_ruled", values)
    assert values["n"] == 64


def test_a_notebook_is_saved_as_its_source(ruled):
    nb, ran = (json.loads(ruled.read_text()) for _ in range(2))
    for cell in ran["cells"]:
        cell["metadata"] |= {"scrolled": True, "execution": {}}
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [{"output_type": "stream", "name": "stdout", "text": "1"}], 3
    ran["metadata"]["language_info"] = {"name": "python", "version": "3.14"}
    nbs.without_results(model={"type": "notebook", "content": ran}, path="x", contents_manager=None)
    assert ran["cells"] == nb["cells"] and ran["metadata"]["language_info"] == {"name": "python"}
    nbs.without_results(model={"type": "file", "content": "text"}, path="x", contents_manager=None)
