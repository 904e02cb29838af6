import copy
import io
import re

import numpy as np
import pytest
import torch

from workbench import BlockSparse, Dense, Dilated, MultiheadAttention, attention, layouts

CAUSAL = Dilated([4, 8, 16], [1, 2, 4], causal=True)


def layer(pattern=CAUSAL, seed=0, embed_dim=24, num_heads=6, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return MultiheadAttention(embed_dim, num_heads, pattern, dtype=dtype, **options)


def tokens(n=29, batch=2, embed_dim=24, dtype=torch.float64):
    return torch.randn(batch, n, embed_dim, generator=torch.Generator().manual_seed(1), dtype=dtype)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_dense_is_torchs_multihead_attention(bias):
    ours, x = layer(Dense(), bias=bias), tokens()
    theirs = torch.nn.MultiheadAttention(24, 6, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        theirs.out_proj.weight.copy_(ours.out.weight)
        if bias:
            theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
            theirs.out_proj.bias.copy_(ours.out.bias)
    close(ours(x), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_is_projections_around_attention(kv_heads):
    module, x = layer(num_kv_heads=kv_heads), tokens()
    assert module.k.out_features == module.v.out_features == 4 * kv_heads
    q, k, v = (f(x).unflatten(-1, (-1, 4)) for f in (module.q, module.k, module.v))
    assert q.shape == (2, 29, 6, 4) and k.shape == (2, 29, kv_heads, 4)
    close(module(x), module.out(attention(q, k, v, CAUSAL).flatten(-2)))


def test_every_parameter_has_a_gradient():
    module = layer(num_kv_heads=2)
    module(tokens()).square().sum().backward()
    for name, parameter in module.named_parameters():
        moved = parameter.grad is not None and bool(parameter.grad.any())
        assert moved or name == "k.bias", name  # a softmax does not change where all scores move


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_cached_decoding_through_the_context_is_the_full_run(kv_heads):
    for pattern in (CAUSAL, BlockSparse(layouts.local(1), 4, causal=True), Dense(True)):
        module, x = layer(pattern, num_kv_heads=kv_heads).eval(), tokens()
        full = module(x)
        for t in range(29):
            close(module(x[:, t : t + 1], x[:, : t + 1]), full[:, t : t + 1])
        close(module(x[:, -10:], x), full[:, -10:])


def test_state_dict_round_trip():
    module, other, x = layer(seed=0), layer(seed=1), tokens()
    assert set(module.state_dict()) == {f"{p}.{w}" for p in ("q", "k", "v", "out") for w in ("weight", "bias")}
    assert not torch.equal(module(x), other(x))
    other.load_state_dict(module.state_dict())
    assert torch.equal(module(x), other(x))


def test_deepcopy_and_a_saved_module_are_independent():
    module, x = layer(BlockSparse(layouts.local(1) | layouts.global_(1), 4)), tokens()
    want = module(x)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(module), torch.load(saved, weights_only=False)):
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
    "attention-dropout": ({"attention_dropout": 0.1}, "attention_dropout=0.1: want 0; `dropout` acts on the output"),
    "dropout-of-2": ({"dropout": 2}, "dropout=2: want a number from 0 to 1"),
    "bias-in-words": ({"bias": "no"}, "bias='no': want True or False"),
    "of-torch": ({"batch_first": True}, "batch_first=True: MultiheadAttention has no such option"),
    "no-pattern": ({"pattern": "dense"}, "pattern='dense': want a pattern"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=list(REFUSED))
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(**options)


def test_masks_are_refused_by_name_not_ignored():
    module, x = layer(), tokens()
    for name, words in (("key_padding_mask", "lengths="), ("attn_mask", "which pairs attend is the pattern's to say")):
        with pytest.raises(ValueError, match=f"(?s){name}=.*{words}"):
            module(x, **{name: torch.ones(2, 29, dtype=torch.bool)})
    with pytest.raises(ValueError, match="is_causal=True: MultiheadAttention has no such option; the pattern says it"):
        module(x, is_causal=True)


def test_bad_inputs_are_refused_with_the_shapes():
    module, x = layer(), tokens()
    with pytest.raises(ValueError, match=re.escape("x is torch.float64 (29, 24): want a tensor (B, N, 24)")):
        module(x[0])
    with pytest.raises(ValueError, match=re.escape("context is torch.float64 (2, 29, 23): want a tensor (B, N, 24)")):
        module(x, x[..., 1:])
    want = "{} is {} (2, 29, 24), the layer's weights are torch.float64: want one dtype, {}.to(torch.float64){}"
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        also = "" if dtype == torch.int64 else f" or the layer's .to({dtype})"
        for name, given in (("x", [x.to(dtype), x]), ("context", [x, x.to(dtype)])):
            with pytest.raises(ValueError, match=re.escape(want.format(name, dtype, name, also)) + "$"):
                module(*given)
    with torch.autocast("cpu", torch.bfloat16):  # which casts what is not float64
        assert layer(dtype=torch.float32)(x.half()).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="x is torch.float64 .*weights are torch.float32"):
            layer(dtype=torch.float32)(x)
    with pytest.raises(ValueError, match="pattern=4: want a pattern"):
        MultiheadAttention(Dense(), 64, 4)
    with pytest.raises(ValueError, match="29 queries on 28 keys"):
        module(x, x[:, 1:])
    with pytest.raises(ValueError, match=re.escape("q (2, 29, 6, 4), k (1, 29, 6, 4)")):
        module(x, x[:1])


def test_numpy_integers_are_the_numbers_that_they_are():
    module = layer(embed_dim=np.int64(24), num_heads=np.int32(6), num_kv_heads=np.int8(2), backend="torch")
    assert module(tokens()).shape == (2, 29, 24) and type(module.num_heads) is int


def test_repr_says_what_it_is():
    text = repr(layer(num_kv_heads=2))
    assert "num_heads=6, num_kv_heads=2" in text and "segment_lengths=[4, 8, 16]" in text
