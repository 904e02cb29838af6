"""Tiny models of random weights, beside the library's own attention."""

import pytest
import torch

import workbench as wb
from tests.tools import refused

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
LONGNET = wb.Dilated([8, 32], [1, 2], causal=True)
TOKENS = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))


def both(pattern, kind="Llama", **options):
    """The same model with the library's attention and with ours."""
    from workbench.models import huggingface

    huggingface.register("ours", pattern)
    config, made = (getattr(transformers, f"{kind}{x}") for x in ("Config", "Model"))
    models = [made._from_config(config(**SIZES, **options), attn_implementation=x) for x in ("eager", "ours")]
    models[1].load_state_dict(models[0].state_dict())
    assert [x.config._attn_implementation for x in models] == ["eager", "ours"]
    return [x.double().eval() for x in models]


def of(model, *tokens, **options):
    with torch.no_grad():
        return model(*tokens, **options).last_hidden_state


def close(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=3e-6)  # the library's softmax is float32


@pytest.mark.parametrize("kind, causal, options", [("Llama", True, {"num_key_value_heads": 2}), ("Bert", False, {})])
def test_dense_is_the_models_own_also_of_padded_sequences(kind, causal, options):
    theirs, ours = both(wb.Dense(causal), kind, **options)
    close(of(ours, TOKENS), of(theirs, TOKENS))
    kept = torch.arange(30) < torch.tensor([[30], [17]])
    one, other = (of(x, TOKENS, attention_mask=kept.long()) for x in (ours, theirs))
    close(one[kept], other[kept])


def test_a_pattern_is_the_models_own_with_its_mask():
    theirs, ours = both(LONGNET)
    mask = LONGNET.multiplicity(30, 4).double().log()[None]  # a pair that two branches show counts twice
    close(of(ours, TOKENS), of(theirs, TOKENS, attention_mask=mask))


def test_decoding_with_the_librarys_cache_is_the_whole():
    _, ours = both(LONGNET)
    cache = transformers.DynamicCache(config=ours.config)
    steps = [of(ours, TOKENS[:, a:b], past_key_values=cache) for a, b in ((0, 20), (20, 21), (21, 30))]
    close(torch.cat(steps, 1), of(ours, TOKENS))


def test_what_is_not_computed_is_refused():
    _, window = both(wb.Dense(True), "Mistral", sliding_window=4)
    refused("sliding_window", of, window, TOKENS)
    _, ours = both(wb.Dense(True), attention_dropout=0.1)
    refused("pad at the right", of, ours, TOKENS, attention_mask=(torch.arange(30) > 3).expand(2, -1).long())
    refused("dropout=0.1: LlamaAttention by workbench has no such option", of, ours.train(), TOKENS)
    _, blind = both(wb.Dense())
    refused(r"Dense\(causal=False\) in LlamaAttention: want causal=True, as the model is", of, blind, TOKENS)
