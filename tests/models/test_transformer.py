import copy
import io
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tools import refused
from workbench import BlockSparse, Cache, Dense, Dilated, LongNet, Transformer, Window, layouts
from workbench.models import loss

SIZES = {"vocab": 40, "dim": 24, "depth": 2, "heads": 4}


def longnet(seed=0, **options):
    torch.manual_seed(seed)
    return LongNet(**SIZES, segment_lengths=[16, 64], dilation_rates=[1, 2], dtype=torch.float64, **options)


def words(n=50, batch=2):
    return torch.randint(40, (batch, n), generator=torch.Generator().manual_seed(1))


def gradients(model, value):
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(value, [*model.parameters()]), strict=True))


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("logits", [40 * 7, 1 << 20])
def test_the_loss_in_chunks_is_torchs_of_all_logits(monkeypatch, tied, logits):
    monkeypatch.setattr(loss, "LOGITS", logits)
    model, tokens = longnet(tied=tied), words()
    labels = torch.where(torch.rand(2, 50) < 0.3, -100, tokens)
    want = cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    close(model.loss(tokens, labels), want)
    close(gradients(model, 3 * model.loss(tokens, labels)), gradients(model, 3 * want))
    following = cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    close(model.loss(tokens), following)
    with torch.no_grad():
        close(model.loss(tokens), following)
    assert model.loss(tokens[:, :1]).item() == 0  # nothing follows


def test_gradients_of_a_long_batch_survive_float16():
    x, weight, labels = torch.randn(1 << 14, 8), torch.randn(99, 8), torch.arange(1 << 14) % 99
    both = [t.requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(cross_entropy(x @ weight.T, labels), both)
    with torch.autocast("cpu", torch.float16):
        found = 65536 * loss.cross_entropy(x, weight, labels)
    refused("no second derivatives", torch.autograd.grad, found, both, create_graph=True)
    for one, other in zip(torch.autograd.grad(found, both), want, strict=True):
        assert (one / 65536 - other).norm() < 2e-3 * other.norm()


def test_a_checkpointed_model_is_the_model_also_with_dropout():
    for options in ({}, {"dropout": 0.3}):
        plain, less = longnet(**options), longnet(checkpoint=True, **options)
        torch.manual_seed(2)
        want = plain.loss(words())
        found = gradients(plain, want)
        torch.manual_seed(2)
        close(less.loss(words()), want)
        torch.manual_seed(2)
        close(gradients(less, less.loss(words())), found)


OTHERS = [{"rope": None, "sub_norm": False}, {"rope": 50, "qk_norm": True, "num_kv_heads": 2}]


@pytest.mark.parametrize("options", OTHERS)
def test_a_causal_model_does_not_see_what_follows(options):
    model, tokens = longnet(**options), words()
    close(model(tokens[:, :33]), model(tokens)[:, :33])
    assert all(p.grad is None for p in model.parameters())


def test_in_tile_order_it_is_the_same_model():
    sizes = SIZES | {"segment_lengths": [256, 1024], "dilation_rates": [1, 2], "dtype": torch.float64}
    natural, tiled = LongNet(**sizes), LongNet(**sizes, tokens="tile order")
    tiled.load_state_dict(natural.state_dict())
    close(tiled(words(1024, 1)), natural(words(1024, 1)))
    close(tiled.loss(words(1024, 1)), natural.loss(words(1024, 1)))


def test_copies_and_saved_models_are_the_model_and_stay_tied():
    model, saved = longnet(), io.BytesIO()
    want = model(words())
    torch.save(model, saved)
    saved.seek(0)
    other = longnet(seed=1)
    other.load_state_dict(model.state_dict())
    for twin in (other, copy.deepcopy(model), torch.load(saved, weights_only=False)):
        close(twin(words()), want)
        assert twin.head.weight is twin.embedding.weight and twin.head.weight is not model.head.weight


def test_it_begins_as_magneto_says():
    model = Transformer(40, 256, 8, 4, Dense())
    of = model.layers[3]
    gain = math.log(2 * 8) ** 0.5
    for module, want in (
        (of.attention.q, (2 / 512) ** 0.5), (of.attention.v, gain * (2 / 512) ** 0.5), (model.embedding, 1 / 16),
        (of.attention.out, gain * (2 / 512) ** 0.5), (of.down, gain * (2 / 1280) ** 0.5),
    ):  # fmt: skip
        assert module.weight.std().item() == pytest.approx(want, rel=0.03)
    assert not of.up.bias.any()


def test_what_cannot_be_meant_is_refused():
    model = Transformer(**SIZES, pattern=Dilated([8], [1]))
    refused(r"labels=None: want labels \(B, N\), since a pattern that is not causal", model.loss, words())
    refused(r"tokens is torch.float32 \(2, 50\): want integers \(B, N\)", model, words().float())
    for value in (words().float(), words()[:, :0]):
        refused(r"want integers \(B, N\), N at least 1", longnet().generate, value, 3)
    for options in ({"temperature": -1}, {"chunk": 0}, {"lengths": torch.tensor([50, 0])}):
        refused(f"{[*options][0]}=", longnet().generate, words(), 3, **options)
    with pytest.raises(ValueError, match=r"a cache of Dense\(causal=True\): want one of the layer's pattern, Dilated"):
        longnet().features(words(), [Cache(Dense(True))] * 2)
    for labels in (words()[:, 1:], words().float()):
        refused(r"labels is .*: want integers \(B, N\), of tokens and labels alike", model.loss, words(), labels)
    for of in (longnet().loss, lambda x, lengths: longnet().generate(x, 1, lengths=lengths)):
        refused(r"lengths=\[3, 4\]: want an int32 or int64 tensor", of, words(), lengths=[3, 4])
        refused(r"lengths=\[3, 4, 5\]: want 2 of them", of, words(), lengths=torch.tensor([3, 4, 5]))
    for value in (torch.tensor([0, 60]), torch.zeros(1, 49, dtype=torch.int64)):
        refused(r"documents=.* in a batch of 1 with N=50: want ids", longnet().loss, words(50, 1), documents=value)
    for name, value in (("depth", 0), ("vocab", "many"), ("checkpoint", 1), ("rotary", True)):
        refused(f"^{name}=", Transformer, **SIZES | {"pattern": Dense(), name: value})


def test_documents_and_lengths_are_models_of_each_alone():
    model, tokens = longnet(), words(50, 1)
    alone = [tokens[:, :20], tokens[:, 20:27], tokens[:, 27:]]
    ids = torch.tensor([[0] * 20 + [1] * 7 + [2] * 23])
    want = torch.cat([model(x) for x in alone], 1)
    mean = sum(model.loss(x) * (x.shape[1] - 1) for x in alone) / (50 - 3)
    for documents in (ids, torch.tensor([0, 20, 27, 50])):
        close(model(tokens, documents=documents), want)
        close(model.loss(tokens, documents=documents), mean)
    close(model.loss(tokens, documents=torch.tensor([0, 0, 20, 20, 27, 50, 50])), mean)
    lengths = torch.tensor([50, 7])
    padded = torch.cat([tokens, tokens.flip(1)])
    close(model(padded, lengths=lengths)[1, :7], model(padded[1:, :7])[0])
    each = [model.loss(padded[i : i + 1, :n]) * (n - 1) for i, n in enumerate(lengths.tolist())]
    want = gradients(model, sum(each) / 55)
    packed = torch.cat([padded[:1], padded[1:, :7]], 1), torch.tensor([0, 50, 57])
    for found in (model.loss(padded, lengths=lengths), model.loss(packed[0], documents=packed[1])):
        close(found, sum(each) / 55)
        close(gradients(model, found), want)


GENERATORS = {
    "longnet": {"pattern": Dilated([16, 64], [1, 2], True), "num_kv_heads": 2, "qk_norm": True, "xpos": 8},
    "in-tile-order": {"pattern": Dilated([256, 1024], [1, 2], True), "tokens": "tile order"},
    "dense": {"pattern": Dense(True), "rope": None, "alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05])},
    "window": {"pattern": Window(9, True), "softcap": 2.0, "relative_bias": True},
    "random": {"pattern": BlockSparse(layouts.random(0.5, 1), 8, True)},
}


@pytest.mark.parametrize("options", GENERATORS.values(), ids=list(GENERATORS))
def test_token_by_token_is_the_whole(options):
    torch.manual_seed(0)
    model, prompt = Transformer(**SIZES, **options, dtype=torch.float64), words(20)
    if options.get("relative_bias"):
        torch.nn.init.normal_(model.layers[1].attention.relative_bias)
    out = model.generate(prompt, 30, chunk=7)
    assert torch.equal(out[:, :20], prompt) and torch.equal(out, model.generate(prompt, 30))
    assert torch.equal(model(out)[:, 19:-1].argmax(-1), out[:, 20:])
    caches = [Cache(model.pattern, 50) for _ in model.layers]
    with torch.no_grad():
        steps = [model.features(x, caches) for x in out.split([13, *[1] * 37], 1)]
        close(torch.cat(steps, 1), model.features(out))
    if "relative_bias" not in options and options["pattern"].name != "random":
        padded = model.generate(prompt, 5, lengths=torch.tensor([20, 8]))
        alone = model.generate(prompt[1:, :8], 5)
        assert torch.equal(padded[1, :13], alone[0]) and torch.equal(padded[:1], model.generate(prompt[:1], 5))
        assert not padded[1, 13:].any()


def test_what_is_drawn_follows_the_logits_and_the_generator():
    model, prompt = longnet(), words(20, 1)
    drawn = [model.generate(prompt, 9, temperature=2, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    many = model.generate(prompt.expand(4000, -1), 1, temperature=0.7, generator=torch.Generator().manual_seed(0))
    want = (model(prompt)[0, -1] / 0.7).softmax(-1)
    assert (many[:, -1].bincount(minlength=40) / 4000 - want).abs().max() < 0.04
    with torch.no_grad():
        assert torch.equal(model.generate(prompt, 0), prompt)


def test_two_steps_in_a_row_compiled_or_under_autocast_are_the_models():
    torch._dynamo.reset()
    model, tokens = longnet(), words()
    fast = torch.compile(model, backend="aot_eager")
    for batch in (tokens, tokens.flip(1)):
        close(gradients(model, fast(batch, labels=batch)), gradients(model, model(batch, labels=batch)))
    torch._dynamo.reset()
    model = model.float()
    want, exact = model.loss(tokens), gradients(model, model.loss(tokens))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        found = model.loss(tokens)
    assert found.dtype == torch.float32 and abs(found - want) < 0.02 * want
    for name, x in gradients(model, found).items():
        assert x.dtype == torch.float32 and (x - exact[name]).norm() < 0.1 * exact[name].norm() + 1e-3, name
