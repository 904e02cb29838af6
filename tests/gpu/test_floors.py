"""What a card has to reach: batches of documents, decoding, windows and scores, and the memory of a model's step.

Times are of a card that does nothing else. Each test prints what it found: `pytest -s tests/gpu/test_floors.py`.
"""

import gc

import pytest
import torch

import workbench as wb
from workbench.fit import cards, estimate
from workbench.fit.model import Model
from workbench.probes import timing

PAPER = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
DOCUMENTS = [4096, 8192, 12288, 16384, 24576, 32768, 49152, 65536]
PATTERNS = {"dense": wb.Dense(True), "longnet": wb.Dilated(*PAPER, True), "window": wb.Window(2048, True)}


def tensors(n, heads=12, head_dim=64, batch=1, grads=False, many=3):
    like = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": grads}
    return [torch.randn(batch, n, heads, head_dim, **like) for _ in range(many)]


def ms(**calls):
    """Median times, one call of each in turn."""
    took = timing.compare(calls, samples=7).median_ms
    print({name: round(x, 3) for name, x in took.items()})
    return took


@pytest.mark.parametrize("grads", [False, True], ids=["fwd", "fwdbwd"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_batch_of_documents_costs_what_its_documents_cost(name, grads):
    pattern = PATTERNS[name]
    apart = [tensors(n, grads=grads) for n in DOCUMENTS]
    packed = [torch.cat([x[i] for x in apart], 1).detach().requires_grad_(grads) for i in range(3)]
    cuts, ups = torch.tensor([0, *DOCUMENTS]).cumsum(0), [torch.randn_like(x[0]) for x in apart]

    def run(qkv, up, **options):
        out = wb.attention(*qkv, pattern, **options)
        return torch.autograd.grad(out, qkv, up) if grads else out

    up = torch.cat(ups, 1)
    single = {str(x[0].shape[1]): lambda x=x, up=up: run(x, up) for x, up in zip(apart, ups, strict=True)}
    took = ms(packed=lambda: run(packed, up, documents=cuts), **single)
    assert took["packed"] <= 1.1 * took[list(single)].sum()


@torch.no_grad()
@pytest.mark.parametrize("name", ["longnet", "window"])
def test_a_token_after_131_072_takes_at_most_twice_its_launches(name):
    pattern, steps = PATTERNS[name], {}
    for label, n in (("few", 64), ("many", 131_072 - 2048)):
        cache, k, x = wb.Cache(pattern), *tensors(n, many=1), *tensors(1, many=1)
        cache.step(x, x, x)
        cache.step(x, k, k)  # held, and not attended to
        steps[label] = lambda cache=cache, x=x: cache.step(x, x, x)
    took = ms(**steps)
    assert took["many"] <= 2 * took["few"]


@torch.no_grad()
def test_windows_are_as_fast_as_neighborhoods_on_a_line():
    qkv, line = tensors(32_768, 16, 128), wb.Neighborhood((32_768,), 1024)
    took = ms(line=lambda: wb.attention(*qkv, line), window=lambda: wb.attention(*qkv, wb.Window(2048)),
              causal=lambda: wb.attention(*qkv, wb.Window(1024, True)),
              sinks=lambda: wb.attention(*qkv, wb.Window(1024, True, sinks=4)))  # fmt: skip
    assert took["window"] <= 1.1 * took["line"] and max(took["causal"], took["sinks"]) <= took["line"]


@pytest.mark.parametrize("pattern, options", [
    (wb.Window(300, True), {"softcap": 20.0}), (wb.Dense(True), {"alibi_slopes": torch.rand(4)}),
    (wb.Window(300), {"relative_bias": torch.randn(4, 301)}),
], ids=["softcap", "alibi", "bias"])  # fmt: skip
def test_scores_are_changed_as_in_the_definition(pattern, options):
    q, k, v = tensors(1500, 4)
    options = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    got, want = wb.attention(q, k, v, pattern, **options), wb.reference(q, k, v, pattern, **options)[0]
    assert (got.double() - want).norm() <= 0.01 * want.norm()


LONGNET = wb.Dilated([2048, 8192, 32768], [1, 4, 16], causal=True)
BASE = {"heads": 12, "head_dim": 64, "dtype": "bfloat16", "mode": "fwdbwd", "device": "cuda", "layers": 12}
STEPS = {
    "longnet, checkpointed": lambda: Model(LONGNET, 131_072, checkpoint=True, **BASE),
    "dense, sgd": lambda: Model(wb.Dense(True), 4096, batch=4, optimizer="sgd", **BASE),
    "longnet, float32": lambda: Model(LONGNET, 8192, **BASE | {"dtype": "float32"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_takes_the_memory_that_is_predicted(name):
    case, memory = STEPS[name](), torch.cuda.memory_stats
    for _ in range(2):  # the first compiles
        gc.collect()
        torch.cuda.empty_cache()
        before = memory()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        call, _ = case.prepare_from(None)
        result = call()
        torch.cuda.synchronize()
        measured = memory()["requested_bytes.all.peak"] - before
        del call, result
    predicted = estimate.trace(case, cards.from_device()).requested_bytes
    print(f"{name}: {predicted:,} bytes predicted, {measured:,} measured")
    assert abs(predicted / measured - 1) <= 0.01
