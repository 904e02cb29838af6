"""Names at the ends of lines: inside the axis, and apart."""

from matplotlib import pyplot

from workbench.plots import style


def named(ends):
    fig, ax = style.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    style.name_ends(ax, ends)
    pyplot.close(fig)
    return {text.get_text(): text.xyann[1] for text in ax.texts}


def test_many_names_stay_inside_the_axis_and_apart():
    for many in (3, 11, 17, 30):
        places = [*named([(1, 0.02 * k / many, f"line {k}", "black") for k in range(many)]).values()]
        assert places[0] > -1e-9 and places[-1] <= style.TOP and len(places) == many
        steps = [b - a for a, b in zip(places, places[1:], strict=False)]
        assert min(steps) > 0.03 and max(steps) < 0.06
    high = [*named([(1, 0.9 + k / 100, str(k), str(k / 10)) for k in range(5)]).values()]
    assert high[-1] == style.TOP and high[0] > 0.7
