"""What a model takes on a card, without the card: its tensors counted by hand, and by the parts that it is made of."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from workbench import cli
from workbench.fit import estimate, frontier
from workbench.fit.model import Model
from workbench.probes import catalog

SMALL = Model(wb.Dense(True), 4096, 4, 64, "bfloat16", mode="fwdbwd", device="cuda", layers=3, vocab=1000)


def test_any_program_is_followed_the_optimizers_states_too():

    def prepare():
        layer = nn.Linear(1024, 1024, bias=False, device="cuda")  # 4 MiB
        optimizer, x = torch.optim.AdamW(layer.parameters()), torch.ones(4096, 1024, device="cuda")  # 16 MiB

        def step():
            layer(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    inputs, cublas, moments = 4 + 16, 2 * 8.125, 2 * 4
    first, second = (estimate.program(prepare, "a100-80gb", calls) for calls in (1, 2))
    assert first.inputs_bytes == second.inputs_bytes == inputs * 2**20
    assert first.requested_bytes == (inputs + cublas + 4 + moments + 4) * 2**20  # the gradient; AdamW's square roots
    assert second.requested_bytes == (inputs + cublas + moments + 16) * 2**20 + 4  # the result, and its sum


def test_a_checkpointed_model_holds_one_input_a_layer():
    one = 4096 * 256 * 4
    deep, deeper = (estimate.trace(replace(SMALL, checkpoint=True, layers=x), "h100") for x in (4, 5))
    parameters = 12 * 256**2 + (4 + 4 + 1 + 2 + 2 + 4 + 4) * 256
    assert deeper.requested_bytes - deep.requested_bytes == pytest.approx(one + 12 * parameters, rel=1e-3)
    plain = [estimate.trace(replace(SMALL, layers=x), "h100").requested_bytes for x in (4, 5)]
    assert plain[1] - plain[0] > 10 * one and deep.milliseconds is None


@pytest.mark.parametrize("optimizer, states", [("adamw", 2), ("sgd", 1)])
def test_an_optimizers_states_are_held(optimizer, states):
    case = replace(SMALL, optimizer=optimizer, vocab=200_000, layers=1).at(64)
    held = sum(nbytes == 200_000 * 256 * 4 for _, nbytes in estimate.trace(case, "h100").at_peak)
    assert held == states + 4  # the weights, their gradients as head and as embedding, and the sum of these


def test_torchs_own_layers_checkpointed_under_autocast_are_followed():
    """What is computed again is computed as the first time, in the order that autocast casts."""

    def prepare(again):
        layer = nn.TransformerEncoderLayer(256, 4, 256, dropout=0.0, batch_first=True)
        layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(4)).to("cuda")

        def step():
            x = torch.ones(1, 8192, 256, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.float16):
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            x.float().sum().backward()

        return step

    with pytest.raises(estimate.CannotTrace, match="nothing was made on 'cuda'"):
        estimate.program(lambda: lambda: nn.Linear(4, 4)(torch.ones(4)), "t4")
    less, more = (estimate.program(lambda again=again: prepare(again), "t4", 1) for again in (True, False))
    assert less.requested_bytes < more.requested_bytes < 8192**2 * 4  # nor are there N x N scores


def test_the_command_tells_of_a_model(capsys):
    words = "fit --layers 2 --width 256 --vocab 1k --checkpoint --card rtx4090 --n 4k --pattern longnet-paper --json"
    assert cli.main(words.split()) == 0
    (row,) = json.loads(capsys.readouterr().out)
    at = {"layers": 2, "vocab": 1024, "checkpoint": True, "heads": 4}
    case = replace(SMALL, **at, pattern=catalog.maker("longnet-paper")(4096, False))
    assert row["fits"] and row["longest_n"] > 100_000 and row["way"] == "longnet-paper, auto"
    batch, room = row["longest_batch"], int(23.52 * 2**30) - 552_402_944
    assert 0.9 < row["longest_n"] / 4096 / batch < 1.1
    one, more = (estimate.trace(replace(case, batch=x), "rtx4090") for x in (batch, batch + 1))
    assert frontier.reserves(one, room) and not frontier.reserves(more, room)


REFUSED = {
    "--width 256": "--width: want --layers, too",
    "--layers 0": "--layers 0: want at least 1",
    "--layers 2 --width 250": "--width 250: want heads x head_dim, here 3 x 64",
    "--layers 2 --width 256 --heads 3": "--width 256: want heads x head_dim, here 3 x 64",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_model_is_refused(words, capsys):
    assert cli.main(["fit", *words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err
