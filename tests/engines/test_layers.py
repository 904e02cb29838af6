import copy
import io
import re

import numpy as np
import pytest
import torch

from tests.tools import refused
from workbench import BlockSparse, Dense, Dilated, MultiheadAttention, Window, attention, layouts, tile_order
from workbench.engines import rotary

CAUSAL = Dilated([4, 8, 16], [1, 2, 4], causal=True)


def layer(pattern=CAUSAL, seed=0, embed_dim=24, num_heads=6, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return MultiheadAttention(embed_dim, num_heads, pattern, dtype=dtype, **options)


def tokens(n=29, batch=2, embed_dim=24, dtype=torch.float64):
    return torch.randn(batch, n, embed_dim, generator=torch.Generator().manual_seed(1), dtype=dtype)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_is_projections_around_attention(kv_heads):
    module, x = layer(num_kv_heads=kv_heads), tokens()
    assert module.k.out_features == module.v.out_features == 4 * kv_heads
    q, k, v = (f(x).unflatten(-1, (-1, 4)) for f in (module.q, module.k, module.v))
    assert q.shape == (2, 29, 6, 4) and k.shape == (2, 29, kv_heads, 4)
    close(module(x), module.out(attention(q, k, v, CAUSAL).flatten(-2)))


@pytest.mark.parametrize("bias", [True, False])
def test_dense_is_torchs_layer_whose_state_dict_is_taken_and_named_where_it_is_not(bias):
    to = {"bias": bias, "batch_first": True, "dtype": torch.float64}
    theirs = torch.nn.ModuleDict({"of": torch.nn.MultiheadAttention(24, 6, **to)})
    if bias:
        torch.nn.init.normal_(theirs["of"].in_proj_bias)
    ours, x = torch.nn.ModuleDict({"of": layer(Dense(), bias=bias)}), tokens()
    ours.load_state_dict(theirs.state_dict())
    out, weights = ours["of"](x, x, x, need_weights=False)
    close(out, theirs["of"](x, x, x, need_weights=False)[0])
    assert weights is None and torch.equal(ours["of"](x), out)
    value = tokens(embed_dim=25)[..., 1:]
    close(ours["of"](x, x, value)[0], theirs["of"](x, x, value, need_weights=False)[0])
    for options, name in (({"add_bias_kv": True}, "bias_k"), ({"kdim": 8, "vdim": 9}, "q_proj_weight")):
        with pytest.raises(ValueError, match=f"state_dict has {name}: want that of an nn.MultiheadAttention without"):
            ours["of"].load_state_dict(torch.nn.MultiheadAttention(24, 6, **options).state_dict())


@pytest.mark.parametrize("causal", [False, True])
def test_it_stands_in_torchs_encoder_in_training_and_where_torch_would_skip_it(causal):
    torch.manual_seed(0)
    to = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    theirs = torch.nn.TransformerEncoderLayer(24, 6, 48, **to)
    ours = copy.deepcopy(theirs)
    ours.self_attn = layer(Dense(causal))
    ours.self_attn.load_state_dict(theirs.self_attn.state_dict())
    made = ((theirs, False), (ours, False), (theirs, True))  # the last gets its attention when it is there
    theirs, *each = (torch.nn.TransformerEncoder(x, 2, enable_nested_tensor=nested) for x, nested in made)
    each[1].layers[1].self_attn = copy.deepcopy(ours.self_attn)
    padding, x = torch.arange(29) >= torch.tensor([[29], [11]]), tokens()
    with torch.no_grad(), pytest.raises(ValueError, match="query is nested: want .*enable_nested_tensor=False"):
        each[1].eval()(x, src_key_padding_mask=padding)
    each[1].layers[0].self_attn = copy.deepcopy(ours.self_attn)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(29, dtype=torch.float64) if causal else None
    options = {"mask": mask, "is_causal": causal}
    for ours in each:
        close(ours.train()(x, **options), theirs.train()(x, **options))
        with torch.no_grad():
            close(ours.eval()(x, **options), theirs.eval()(x, **options))
            padded = [f(x, src_key_padding_mask=padding, **options) for f in (ours, theirs.train())]
        for one, other, n in zip(*padded, (29, 11), strict=True):
            close(one[:n], other[:n])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_scores_with_rotary_positions_depend_on_the_distance_alone(qk_norm):
    module, x = layer(Dense(True), rope=100.0, qk_norm=qk_norm), tokens()
    out = module(x)
    later = rotary.table(torch.arange(29) + 7, 4, 100.0, torch.float64)
    close(module(x, rotation=later), out)
    close(module(x[:, -5:], x), out[:, -5:])
    assert not torch.allclose(module(x[:, torch.arange(28, -1, -1)])[:, -1], out[:, -1])  # an order is seen


@pytest.mark.parametrize("nq, shape, words", [
    (6, (2, 4), r"6 queries on 2 keys with a rotation \(2, 4\): want queries that are the last, Nq <= N"),
    (2, (5, 4), r"2 queries on 2 keys with a rotation \(5, 4\): .* and a rotation \(N, 4\)"),
    (2, (2, 8), r"with a rotation \(2, 8\)"),
])  # fmt: skip
def test_positions_are_those_of_the_keys(nq, shape, words):
    refused(words, layer(Dense(), rope=100.0), tokens(nq), tokens(2), rotation=torch.zeros(shape))


def test_a_turn_is_the_complex_product_that_the_paper_writes():
    x, positions = tokens(embed_dim=8)[:, :, None], torch.tensor([5, 1_000_000, *range(27)])
    turned = rotary.turned(x, rotary.table(positions, 8, dtype=torch.float64))
    angles = positions[:, None].double() * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    one, other = (torch.complex(*tensor.chunk(2, -1))[:, :, 0] for tensor in (turned, x))
    close(one, other * torch.exp(1j * angles))


def test_xpos_is_the_decay_with_distance_that_the_paper_writes():
    module, x, at = layer(Dense(True), rope=100.0, xpos=0.5), tokens(32), torch.arange(32)
    q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (module.q, module.k, module.v))
    q, k = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    even, far = torch.arange(2).double() / 2, (at[:, None] - at)[..., None]
    turn = torch.polar(((even + 0.4) / 1.4) ** (far / 0.5), far * 100**-even)
    scores = torch.einsum("bhnd,bhmd,nmd->bhnm", q, k.conj(), turn).real / 2
    want = scores.masked_fill(far[..., 0] < 0, -torch.inf).softmax(-1) @ v
    want = module.out(want.transpose(1, 2).flatten(-2))
    close(module(x), want)
    torch.testing.assert_close(module.float()(x.float()), want.float())
    refused("xpos=0.5 with 33 tokens, which overflow: want at least 33 / 64", module, tokens(33, dtype=torch.float32))
    refused("xpos=0.5 in float16, which overflows", module.half(), x.half())


def test_a_layer_in_tile_order_is_the_layer_with_its_tokens_moved():
    pattern = Dilated([512, 1024], [1, 2], causal=True)
    natural, tiled = (layer(pattern, rope=100.0, sub_norm=True, tokens=x) for x in ("natural", "tile order"))
    order, x = tile_order(pattern, 1024), tokens(1024, 1)
    close(tiled(x[:, order]), natural(x)[:, order])


def test_scores_are_changed_by_what_the_layer_keeps():
    options = {"alibi_slopes": torch.rand(6), "softcap": 2.0, "relative_bias": True}
    module, x = layer(Window(5), **options), tokens()
    assert {"alibi_slopes", "relative_bias"} <= {*module.state_dict()} and module.relative_bias.shape == (6, 5)
    module.relative_bias.data.normal_()
    q, k, v = (f(x).unflatten(-1, (-1, 4)) for f in (module.q, module.k, module.v))
    want = attention(q, k, v, Window(5), **options | {"relative_bias": module.relative_bias})
    close(module(x), module.out(want.flatten(-2)))
    assert torch.autograd.grad(module(x).sum(), module.relative_bias)[0].any()
    refused("relative_bias with dense: want a Window", layer, Dense(), relative_bias=True)


def test_every_parameter_has_a_gradient():
    module = layer(num_kv_heads=2)
    module(tokens()).square().sum().backward()
    for name, parameter in module.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.any())
        assert moved or name == "k.bias", name  # a softmax does not change where all scores move


def test_copies_and_saved_modules_are_independent():
    of = BlockSparse(layouts.local(1) | layouts.global_(1), 4)
    module, other, x = layer(of), layer(copy.deepcopy(of), seed=1), tokens()
    want, saved = module(x), io.BytesIO()
    assert set(module.state_dict()) == {f"{p}.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")}
    assert not torch.equal(other(x), want)
    other.load_state_dict(module.state_dict())
    torch.save(module, saved)
    saved.seek(0)
    for twin in (other, copy.deepcopy(module), torch.load(saved, weights_only=False)):
        assert torch.equal(twin(x), want)
        assert twin.pattern is not module.pattern
        twin(x).sum().backward()
        assert all(p.grad is None for p in module.parameters())
        with torch.no_grad():
            twin.q.weight.zero_()
        assert torch.equal(module(x), want)


def test_eval_with_dropout_is_deterministic_and_equals_no_dropout():
    dropping, plain, x = layer(dropout=0.1), layer(), tokens()
    dropping.eval()
    assert torch.equal(dropping(x), dropping(x)) and torch.equal(dropping(x), plain(x))
    dropping.train()
    first, second = dropping(x), dropping(x)
    assert not torch.equal(first, second)
    kept = first != 0
    close(first[kept], plain(x)[kept] / 0.9)  # dropout of the output: what is kept is scaled up


def test_autocast_and_other_dtypes():
    module, x = layer(dtype=torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and module.q.weight.grad.dtype == torch.float32
    with torch.no_grad():
        assert float((out.float() - module(x)).norm() / module(x).norm()) < 0.02
    half = layer(dtype=torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    meta = MultiheadAttention(24, 6, CAUSAL, device="meta")
    assert meta(x.to("meta")).shape == x.shape


def test_two_layers_compile_in_one_graph():
    torch._dynamo.reset()
    layers = torch.nn.Sequential(layer(CAUSAL), layer(Dilated([8], [2])), layer(BlockSparse(layouts.local(1), 4)))
    fast, x = torch.compile(layers, backend="aot_eager", fullgraph=True), tokens()
    close(fast(x), layers(x))
    wanted = torch.autograd.grad(layers(x).sum(), list(layers.parameters()))
    close(torch.autograd.grad(fast(x).sum(), list(layers.parameters())), wanted)
    torch._dynamo.reset()


REFUSED = {
    "heads-do-not-divide": ({"num_heads": 5}, "embed_dim=24, num_heads=5: num_heads must divide embed_dim"),
    "no-heads": ({"num_heads": 0}, "num_heads=0: want an int >= 1"),
    "key-heads-do-not-divide": ({"num_kv_heads": 4}, "num_heads=6, num_kv_heads=4: the second must divide the first"),
    "attention-dropout": ({"attention_dropout": 0.1}, "no such option; the weights are not dropped out; apply dropout"),
    "dropout-of-2": ({"dropout": 2}, "dropout=2: want a number from 0 to 1"),
    "rope-of-odd": ({"rope": 10, "num_heads": 8}, "rope=10, head_dim=3: want an even head_dim, or rope=None"),
    "xpos-of-all": ({"rope": 10, "xpos": 9, "pattern": Dense()}, "xpos=9, rope=10, Dense(causal=False): want rope and"),
    "xpos-alone": ({"xpos": 512}, "xpos=512, rope=None, "),
    "bias-in-words": ({"bias": "no"}, "bias='no': want True or False"),
    "of-torch": ({"batch_first": True}, "batch_first=True: MultiheadAttention has no such option"),
    "no-pattern": ({"pattern": "dense"}, "pattern='dense': want a pattern"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=list(REFUSED))
def test_bad_arguments_are_refused(options, message):
    refused(re.escape(message), layer, **options)


def test_masks_are_refused_by_name_not_ignored():
    module, x = layer(), tokens()
    refused("(?s)attn_mask=.*which pairs attend is the pattern's to say", module, x, attn_mask=torch.ones(29, 29) > 0)
    refused("is_causal=True: .* has no such option; the pattern says it", layer(Dense()), x, is_causal=True)
    refused("need_weights=True: .* has no such option; the weights are", module, x, x, x, need_weights=True)
    left = torch.arange(29).expand(2, -1) < 3
    for padding in (left, left[:, :-1], ~left * 0.5):
        want = r"key_padding_mask is .*: want \(B, N\) = \(2, 29\), True .* pad at the right"
        refused(want, module, x, key_padding_mask=padding)


def test_bad_inputs_are_refused_with_the_shapes():
    module, x = layer(), tokens()
    refused(re.escape("query is torch.float64 (29, 24): want a tensor (B, N, 24)"), module, x[0])
    refused(re.escape("key is torch.float64 (2, 29, 23): want a tensor (B, N, 24)"), module, x, x[..., 1:])
    want = "{} is {} (2, 29, 24), the layer's weights are torch.float64: want one dtype, {}.to(torch.float64){}"
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        also = "" if dtype == torch.int64 else f" or the layer's .to({dtype})"
        for name, given in (("query", [x.to(dtype), x]), ("key", [x, x.to(dtype)])):
            refused(re.escape(want.format(name, dtype, name, also)) + "$", module, *given)
    with torch.autocast("cpu", torch.bfloat16):  # which casts what is not float64
        assert layer(dtype=torch.float32)(x.half()).dtype == torch.bfloat16
        refused("query is torch.float64 .*weights are torch.float32", layer(dtype=torch.float32), x)


def test_numpy_integers_are_the_numbers_that_they_are():
    module = layer(embed_dim=np.int64(24), num_heads=np.int32(6), num_kv_heads=np.int8(2), backend="torch")
    assert module(tokens()).shape == (2, 29, 24) and type(module.num_heads) is int
    assert "num_heads=6, num_kv_heads=2" in repr(module) and "segment_lengths=[4, 8, 16]" in repr(module)
