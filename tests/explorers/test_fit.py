"""The calculator in a real browser: its allocator, programs, times and limits are Python's."""

import json
from random import Random

import pytest
import torch

from tests import browser, programs
from workbench import Dense, MultiheadAttention, explorers
from workbench.explorers import fit
from workbench.fit import cards, estimate, frontier
from workbench.models.layer import Layer

DATA = fit.known()


def setting(card, world, n, batch, heads, head_dim, dtype, mode, **more) -> dict:
    its = next(x for x in DATA["cards"] if x["key"] == card.key)
    found = {"card": card.key, "gib": its["gib"], "cards": world, "batch": batch, "heads": heads, "head_dim": head_dim}
    return found | {"dtype": dtype, "mode": mode, "layers": 0, "seconds": 60.0} | more


@pytest.fixture(scope="module")
def model():
    script = f"{explorers.source('fit_model.js')}\nconst DATA = {json.dumps(DATA)}, model = fitModel(DATA);"
    with browser.shown(f"<script>{script}</script>") as tab:
        yield lambda expression: json.loads(tab.run(f"JSON.stringify({expression})"))


@pytest.mark.browser
def test_the_page_computes_bytes_and_times_as_python_does(model):
    random, asked, want = Random(7), [], []
    for _ in range(200):
        words, way, card, world, n, *rest = programs.drawn(random, DATA, fit.WORLDS)
        asked.append([setting(card, world, n, *rest), way, n])
        steps = programs.program_of(DATA, words, card, world, *rest[:2])
        ms = estimate.milliseconds(fit.case(way, n, *rest), card, way.split(", ")[1]) if world == 1 else None
        want.append((programs.reserved(steps, world, n, *rest), ms))
    found = model(f"{json.dumps(asked)}.map(([s, way, n]) => [model.reserved(s, way, n, Infinity), "
                  "model.milliseconds(s, way, n)])")  # fmt: skip
    assert [x for x, _ in found] == [x for x, _ in want]
    for (_, ms), (_, exact), (at, *_) in zip(found, want, asked, strict=True):
        assert ms == exact if exact is None else ms == pytest.approx(exact, rel=0.01), at


@pytest.mark.browser
def test_the_page_finds_the_longest_as_the_search_does(model):
    for way, card, heads, dtype, mode in (
        ("dense, eager", "h100", 8, "float16", "fwdbwd"), ("dense, cudnn", "h200", 16, "bfloat16", "fwdbwd"),
        ("dense, efficient", "gtx1080", 8, "float32", "fwd"),
        ("longnet-paper, triton", "rtx3090", 12, "float16", "fwd"),
        ("window-blocks, triton", "rtx3090", 16, "float16", "fwdbwd"),
    ):  # fmt: skip
        sizes = (1, heads, 64, dtype, mode)
        found = model(f"model.longest({json.dumps(setting(cards.find(card), 1, 0, *sizes))}, {json.dumps(way)})")
        how = {"card": card, "grain": fit.grain(way), "step": 0.02, "limit_n": 1 << 22, "say": None}
        want = frontier.search(lambda n, way=way, sizes=sizes: fit.case(way, n, *sizes), **how)
        assert found["limiter"] == want["limiter"]
        assert found["n"] == pytest.approx(want["n"], abs=0, rel=0.003 if want["limiter"] == "memory" else 0)


@pytest.mark.browser
def test_the_page_shows_what_is_asked_and_keeps_it_in_the_address():
    with browser.shown(fit.calculator("rtx3090", n=65_536, heads=8)._repr_html_()) as tab:
        rows = "[...document.querySelectorAll('.x-fit tbody tr')].map(row => row.textContent)"
        said = "document.querySelector('[role=status]').textContent"
        assert len(tab.run(rows)) == len(fit.WAYS) and "ways run N = 65,536 in at most 60 s; the" in tab.run(said)
        assert any("not on this card" in row for row in tab.run(rows))  # FlashAttention-4
        assert "longest Nlog scale; dashed: your N" in tab.run("document.querySelector('.x-fit thead').textContent")
        longest = tab.run("document.querySelector('.x-fit tbody td').textContent")
        for name, value in (("layers", "12"), ("heads", "16")):
            tab.slide(f"[name={name}]", value)
        assert tab.run("document.querySelector('.x-fit tbody td').textContent") != longest
        assert "layers=12" in tab.run("location.hash") and "12 transformer blocks alone" in tab.run(said)
        tab.slide("[name=cards]", "2")  # over which no time is modelled
        assert "0 of 9 ways" in tab.run(said) and any("memory (time not modelled)" in row for row in tab.run(rows))


def test_programs_are_those_of_the_trace():
    """On settings that they were not made from: what the page says of its errors."""
    (steps, fits), (_, several) = programs.errors(DATA, 60, 13), programs.errors(DATA, 20, 13, fit.WORLDS[1:])
    assert sum(x == 0 for x in steps) >= 0.95 * len(steps) and max(steps) <= DATA["checked"]["worst"] + 0.005
    assert max(fits + several) <= 0.05 and DATA["checked"]["fitted"] <= 0.05


def stack(layers: int):
    def step(q, k, v):
        """The forward and the backward of `layers` blocks, with the gradients and the states of Adam held."""
        to = {"device": q.device, "dtype": q.dtype}
        with torch.enable_grad():
            width, heads = q.shape[2] * q.shape[3], q.shape[2]
            blocks = [Layer(width, MultiheadAttention(width, heads, Dense(), **to), **to) for _ in range(layers)]
            parameters = [p for block in blocks for p in block.parameters()]
            states = [torch.empty(p.shape, device=q.device) for p in parameters for _ in range(3)]  # float32
            for p in parameters:
                p.grad = torch.empty_like(p)
            x = q.detach().flatten(-2).clone().requires_grad_()
            for block in blocks:
                x = block(x)
            x.backward(torch.empty_like(x))
        return states

    return step


@pytest.mark.browser
@pytest.mark.parametrize("layers", [2, 6])
def test_a_training_step_of_blocks_is_what_a_traced_stack_takes(model, layers):
    n, heads, head_dim = 65_536, 16, 64
    case = fit.case("dense, cudnn", n, 1, heads, head_dim, "float16", "fwd")
    found = estimate.trace(frontier.replace(case, backend=stack(layers)), "h100")
    want = found.requested_bytes - 3 * n * heads * head_dim * 2  # less q, k and v of the case, which the stack has not
    at = setting(cards.find("h100"), 1, n, 1, heads, head_dim, "float16", "fwdbwd", layers=layers)
    assert model(f"model.reserved({json.dumps(at)}, 'dense, cudnn', {n}, Infinity)") == pytest.approx(want, rel=0.01)
