"""A name means one pattern everywhere."""

import pytest

from workbench.analysis import multicard
from workbench.patterns import from_spec
from workbench.probes import catalog


@pytest.mark.parametrize("name", catalog.PATTERNS)
def test_a_name_is_one_pattern_of_that_name(name):
    made = catalog.maker(name)(1 << 14, False)
    assert from_spec(made.spec()) == made or made.spec() == from_spec(made.spec()).spec()
    assert made.name.startswith("longnet-p") <= (made.name == name)  # where a pattern has a name of its own, it is this


def test_a_name_that_means_several_patterns_is_refused_with_the_choices():
    longnets = "longnet-paper or longnet-pow2 or longnet-geometric"
    for name, want in (("longnet", longnets), ("window", "window-blocks or window-tokens")):
        with pytest.raises(ValueError, match=f"pattern='{name}': want {want}"):
            catalog.maker(name)
    with pytest.raises(ValueError, match="pattern=None: want one of dense, longnet-paper"):
        catalog.maker(None)
    of_notebook_04 = multicard.at("longnet-geometric", 4096, heads=1, head_dim=8)(1 << 14).pattern
    assert of_notebook_04.spec() == catalog.maker("longnet-geometric")(1 << 14, False).spec()
