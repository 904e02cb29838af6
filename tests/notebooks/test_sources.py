"""What every committed notebook keeps to, read from its source: nothing is run here."""

import re
import statistics
import sys

import pytest

from workbench.fit.cards import CARDS
from workbench.probes import catalog
from workbench.report import notebooks, parameters
from workbench.scaling.strategies import STRATEGIES

PATHS = notebooks.find()


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def nb(request):
    return notebooks.read(request.param)


def cells(nb, kind):
    return [cell for cell in nb["cells"] if cell["cell_type"] == kind]


CLEAR = f"{sys.executable} -m nbconvert --clear-output --inplace {' '.join(map(str, PATHS))}"
RESTORE = "change them back, or as they were committed: git restore notebooks"


def test_no_outputs_are_committed(nb):
    empty = all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(nb, "code"))
    assert empty, f"it was run and saved with its outputs, which `make lab` does not do. To remove them:\n{CLEAR}"


def test_one_cell_of_parameters_all_literals_with_a_profile(nb):
    tagged = [cell for cell in nb["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0]["cell_type"] == "code"
    assert parameters.declared(nb)["profile"] == "quick", f"saved with other parameters: {RESTORE}"


def test_parameters_keep_their_own_rules_and_their_choices_are_all_there_are(nb):
    own = {key: value for key, value in parameters.declared(nb).items() if key != "profile"}
    parameters.settle({"notebook": nb}, "quick", own)  # raises where a default is not taken
    for key in ("card", "cards", "fit_card"):
        assert key not in own or parameters.rules(nb)[key]["choices"] == list(CARDS)
    assert "strategies" not in own or parameters.rules(nb)["strategies"]["choices"] == list(STRATEGIES)
    if "card_groups" in own:
        groups = {name.split(" ")[0] for name in catalog.one_card()}
        assert set(parameters.rules(nb)["card_groups"]["choices"]) == groups


def test_profiles_set_only_what_is_declared_each_of_its_kind(nb):
    own = nb["metadata"]["workbench"]
    assert set(own["profiles"]) == set(parameters.PROFILES)
    for profile in parameters.PROFILES:
        parameters.settle({"notebook": nb}, profile, {})  # raises where one does not fit


def test_cells_are_short(nb):
    lengths = [len(notebooks.source(cell).splitlines()) for cell in cells(nb, "code")]
    assert max(lengths) <= 25 and statistics.median(lengths) <= 6


def test_it_begins_with_a_title_and_ends_with_something_to_try(nb):
    texts = [notebooks.source(cell) for cell in cells(nb, "markdown")]
    assert texts[0].startswith("# ")
    assert notebooks.source(nb["cells"][-1]) == texts[-1]
    headings = [line for text in texts for line in text.splitlines() if re.match(r"##? ", line)]
    assert headings[-1] == "## Something to try"
    assert not [line for line in headings if re.match(r"#+ \d", line)]


def test_its_last_code_is_its_answer_in_short_and_it_names_its_question(nb):
    last = cells(nb, "code")[-1]
    assert "in-short" in last["metadata"].get("tags", []) and "in_short(" in notebooks.source(last)
    assert nb["metadata"]["workbench"]["question"].endswith("?")


def test_conclusions_are_computed_not_typed(nb):
    """A decimal number or a percentage in Markdown, before what is left to try, is a result that no cell computed."""
    for cell in cells(nb, "markdown")[:-1]:
        prose = re.sub(r"\$[^$]*\$|`[^`]*`|arXiv[: ]*\S+", "", notebooks.source(cell))
        assert not re.search(r"\d+\.\d+(?!\.)|\d+ ?%", prose), prose
