from types import SimpleNamespace

import pytest
import torch

from tests.tools import refused
from workbench.fit import cards
from workbench.fit.cards import CARDS, GIB, MIB
from workbench.harness import machine

ON_THE_BOX = {  # GB
    "gtx1080": 8, "rtx2080ti": 11, "rtx3060": 12, "rtx3090": 24, "rtx4090": 24, "rtx5090": 32, "t4": 16, "l4": 24,
    "v100-16gb": 16, "v100-32gb": 32, "a10": 24, "a10g": 24, "l40s": 48, "a100-40gb": 40, "a100-80gb": 80, "h100": 80,
    "h100-pcie": 80, "h200": 141, "b200": 180, "rtx3080": 10, "rtx4080": 16, "rtxa6000": 48, "h100-nvl": 94,
    "mi300x": 192,
}  # fmt: skip
every_card = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)


def test_every_card_is_there_once():
    assert {key: card.key for key, card in CARDS.items()} == {key: key for key in ON_THE_BOX}
    assert len({card.name for card in CARDS.values()}) == len(CARDS)
    totals = [card.total_bytes for card in CARDS.values()]
    assert totals == sorted(totals)
    assert len({hash(card) for card in CARDS.values()}) == len(CARDS)  # may key a cache


@every_card
def test_memory_is_a_little_less_than_on_the_box(card):
    assert 0.91 < card.total_bytes / (ON_THE_BOX[card.key] * GIB) < 0.9999
    assert all(type(x) is int for x in (card.total_bytes, card.context_bytes, card.communicator_bytes))
    assert 0.2 * GIB < card.context_bytes < 1.1 * GIB and 0.2 * GIB < card.communicator_bytes < 1.1 * GIB
    assert card.workspace_bytes == (32 * MIB if card.capability >= (9, 0) else 8_519_680)


@every_card
def test_speeds_are_consistent(card):
    speeds = card.matmul_tflops
    if card.key == "mi300x":
        return
    assert ("bfloat16" in speeds) == ("tf32" in speeds) == (card.capability >= (8, 0))
    order = [speeds[x] for x in ("float32", "tf32", "float16", "bfloat16") if x in speeds]
    assert order == sorted(order) and speeds["float32"] > 1
    assert speeds.get("bfloat16", speeds["float16"]) == speeds["float16"]  # no units are faster in one of them


@every_card
def test_a_card_is_found_by_its_key_and_by_its_device(card):
    assert machine.short_name(card.name) == card.key.split("-")[0]
    for name in (card.key, card.key.upper(), card.name, card.name.lower(), card.name.replace("NVIDIA ", "")):
        assert cards.find(name) is card


@pytest.mark.parametrize("name, key", [
    ("GeForce GTX 1080", "gtx1080"), ("a100 80GB", "a100-80gb"), ("A6000", "rtxa6000"), ("4090", "rtx4090"),
    ("h100 NVL", "h100-nvl"),
])  # fmt: skip
def test_a_card_is_found_by_how_it_is_written(name, key):
    assert cards.find(name).key == key
    assert cards.find(CARDS[key]) is CARDS[key]


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "", None])
def test_another_card_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError) as refused:
        cards.find(name)
    text = str(refused.value)
    assert text.startswith(f"card={name!r}: want one of 'gtx1080', ") and "'NVIDIA H100 80GB HBM3'" in text
    assert all(repr(key) in text for key in CARDS)


@pytest.fixture
def plugged_in(monkeypatch):
    def plug(name, total, capability):
        found = SimpleNamespace(name=name, total_memory=total, multi_processor_count=9)
        found.major, found.minor = capability
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: {1: found}[device])

    return plug


def test_the_card_of_this_machine_is_read(plugged_in):
    plugged_in("NVIDIA H100 80GB HBM3", 85_000_000_001, (9, 0))
    card, listed = cards.from_device(), CARDS["h100"]
    assert card == cards.from_device(1) and (card.total_bytes, card.multiprocessors) == (85_000_000_001, 9)
    assert (card.key, card.matmul_tflops) == ("h100", listed.matmul_tflops)
    assert listed.total_bytes != card.total_bytes and listed.multiprocessors == 132


@pytest.mark.parametrize("name, gib, capability, key, workspace", [
    ("NVIDIA GeForce RTX 3070", 7.8, (8, 6), "rtx3070", 8_519_680),
    ("NVIDIA GH200 96GB", 94.5, (9, 0), "gh20096gb", 32 * MIB),
    ("NVIDIA GeForce RTX 3060", 7.8, (8, 6), "rtx3060", 8_519_680),  # of 8 GB: under one name with that of 12
])  # fmt: skip
def test_a_card_that_is_not_in_the_table_has_no_speeds(name, gib, capability, key, workspace, plugged_in):
    plugged_in(name, int(gib * GIB), capability)
    card = cards.from_device()
    assert (card.key, card.name, card.total_bytes, card.capability) == (key, name, int(gib * GIB), capability)
    assert (card.workspace_bytes, card.context_bytes) == (workspace, CARDS["h100"].context_bytes)
    assert card.matmul_tflops == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_a_machine_without_a_card_says_so():
    refused("no CUDA card", cards.from_device)


@pytest.mark.parametrize("name, near", [("a100", "'a100-40gb' or 'a100-80gb'"), ("rtx20", "'rtx2080ti'")])
def test_part_of_a_name_is_answered_with_what_it_may_be(name, near):
    refused(f"^card='{name}': want {near}$", cards.find, name)
