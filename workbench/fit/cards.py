"""The cards that a prediction can be asked for without owning one: their memory, and how fast they are at best.

A figure is as good as its source, so each has one: `Card.sources` says for every field where it is from, in a few
words, and `Card.measured` names the fields that were measured by us.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import torch

MIB, GIB = 1 << 20, 1 << 30
VIRTUAL = "virtual"  # the key of a card in software (`VirtualCard`), where the CPU's kernels run
SAME_CARD = 0.05  # what drivers say of one kind of card is about 1 % apart over the years


@dataclass(frozen=True)
class Card:
    """One kind of card. Sizes are in bytes.

    key: its short name, "h100". name: what torch calls the device, "NVIDIA H100 80GB HBM3".
    total_bytes: what there is for all processes, as torch reports it: 1 to 9 % under what is printed on the box, most
        where the memory keeps its error correction in itself.
    context_bytes: what a process takes before its first tensor. communicator_bytes: what its process group adds to
        that. workspace_bytes: of cuBLAS, taken by torch once for each handle and stream.
    capability: compute capability, (major, minor). multiprocessors: how many; None for a card not in the table.
    matmul_tflops: {"float32", "tf32", "float16", "bfloat16": 10^12 operations/s}, the vendor's peak, dense, sums in
        float32 as torch has them; what the card has no units for is left out. copy_gbs: 10^9 bytes/s of its memory,
        read and written ones both counted, the vendor's peak. {} and None for a card that is not in the table.
    sources: {field: where it is from}. measured: the fields that were measured by us.
    """

    key: str
    name: str
    total_bytes: int
    context_bytes: int
    communicator_bytes: int
    capability: tuple[int, int]
    workspace_bytes: int
    matmul_tflops: dict[str, float] = field(hash=False)
    copy_gbs: float | None
    multiprocessors: int | None
    sources: dict[str, str] = field(hash=False)
    measured: frozenset[str] = frozenset()


def find(name: str | Card) -> Card:
    """The card of a key ("h100", "a100-40gb") or of a device's full name ("NVIDIA H100 80GB HBM3"), in any case.

    A Card is returned as it is. ValueError for what is not in the table, and for what could be two cards ("a100").
    """
    if isinstance(name, Card):
        return name
    plain = _plain(name) if isinstance(name, str) else ""
    if plain in _named():
        return _named()[plain]
    near = [key for key in CARDS if plain and plain in _plain(key)]
    if near:
        raise ValueError(f"card={name!r}: want {' or '.join(map(repr, near))}")
    keys = ", ".join(map(repr, CARDS))
    raise ValueError(f"card={name!r}: want one of {keys}, or a device's name in full, as {CARDS['h100'].name!r}")


def from_device(device: int | str | torch.device | None = None) -> Card:
    """The card in this machine, by default the current one: its total and capability are read from it.

    A card that is not in the table, by its name and size, has the workspace of its capability and no speeds.
    ValueError where there is no card.
    """
    if not torch.cuda.is_available():
        raise ValueError("no CUDA card in this machine; for another machine's: cards.find('h100')")
    found = torch.cuda.get_device_properties(torch.cuda.current_device() if device is None else device)
    capability, total = (found.major, found.minor), found.total_memory
    card = _named().get(_plain(found.name))
    if card is None or card.capability != capability or abs(total / card.total_bytes - 1) > SAME_CARD:
        card = _card(_plain(found.name), found.name, capability, total, "", {}, None, "none: not in the table of cards")
    read = f"measured: this card, torch {torch.__version__}"
    return replace(
        card,
        total_bytes=total,
        multiprocessors=found.multi_processor_count,
        sources=card.sources | dict.fromkeys(("total_bytes", "capability", "multiprocessors"), read),
        measured=card.measured | {"total_bytes", "capability", "multiprocessors"},
    )


def _named() -> dict[str, Card]:
    return {_plain(name): card for card in CARDS.values() for name in (card.key, card.name)}


def _plain(name: str) -> str:
    """'NVIDIA GeForce RTX 4090', 'GeForce RTX 4090' (older drivers) and 'rtx4090' -> 'rtx4090'."""
    return re.sub(r"\b(nvidia|geforce|tesla)\b|[\W_]", "", name.lower())


def _card(key, name, capability, total, total_from, tflops, gbs, speed_from, context_from=None) -> Card:
    """One row of the table. tflops: "half" is that of float16 and, where the card has it, of bfloat16."""
    large = capability[0] in (9, 10, 12)
    speeds = {dtype: rate for dtype, rate in tflops.items() if dtype != "half"}
    if "half" in tflops:
        speeds |= dict.fromkeys(("float16", "bfloat16") if capability >= (8, 0) else ("float16",), tflops["half"])
    workspace_from = "torch's source: 32 MiB" if large else "torch's source: pools of :4096:2:16:8 KiB"
    if capability[0] > 9:
        workspace_from += "; 8.1 MiB in versions before 2026"
    return Card(
        key,
        name,
        total_bytes=round(total),
        context_bytes=552_402_944,
        communicator_bytes=500_000_000,
        capability=capability,
        workspace_bytes=32 * MIB if large else (4096 * 2 + 16 * 8) * 1024,
        matmul_tflops=speeds,
        copy_gbs=gbs,
        multiprocessors=MULTIPROCESSORS.get(key),
        sources={
            "total_bytes": total_from,
            "context_bytes": context_from or "assumed: that of an H100",
            "communicator_bytes": "assumed: NCCL, about half a GB",
            "capability": "CUDA programming guide",
            "workspace_bytes": workspace_from,
            "matmul_tflops": speed_from,
            "copy_gbs": speed_from,
            "multiprocessors": "NVIDIA's white papers and data sheets of the cards",
        },
        measured=frozenset({"context_bytes", "total_bytes"} if context_from else ()),
    )


MULTIPROCESSORS = {
    "gtx1080": 20, "rtx2080ti": 68, "rtx3060": 28, "t4": 40, "v100-16gb": 80, "a10": 72, "l4": 58, "a10g": 80,
    "rtx4090": 128, "rtx3090": 82, "rtx5090": 170, "v100-32gb": 80, "a100-40gb": 108, "l40s": 142, "h100-pcie": 114,
    "h100": 132, "a100-80gb": 108, "h200": 132, "b200": 148,
}  # fmt: skip

_PRINTED = "torch's device properties, to 1 MiB, as users published them"
_RAISED = "torch's out-of-memory errors, to 0.01 GiB, as users published them"

CARDS: dict[str, Card] = {
    card.key: card
    for card in (
        # its units for float16 are 64 times slower, so float16 is multiplied in float32
        _card(
            "gtx1080", "NVIDIA GeForce GTX 1080", (6, 1), 8118 * MIB, _PRINTED,
            {"float32": 8.87, "half": 8.87}, 320, "NVIDIA GeForce GTX 1080 white paper; float16 at the rate of float32",
        ),
        _card(
            "rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 11019 * MIB, _PRINTED + ", torch 1.8",
            {"float32": 13.4, "half": 53.8}, 616, "NVIDIA Turing architecture white paper, reference clocks",
        ),
        _card(
            "rtx3060", "NVIDIA GeForce RTX 3060", (8, 6), 11931 * MIB, _PRINTED + ", torch 2.4",
            {"float32": 12.7, "tf32": 12.7, "half": 25.5}, 360,
            "computed: 28 multiprocessors at 1.777 GHz by the rates of the GA102 white paper, 192 bits at 15 Gbit/s",
        ),
        _card(
            "t4", "Tesla T4", (7, 5), 15095 * MIB, _PRINTED,
            {"float32": 8.1, "half": 65}, 320, "NVIDIA T4 data sheet",
        ),
        _card(
            "v100-16gb", "Tesla V100-SXM2-16GB", (7, 0), 16160 * MIB, _PRINTED + ", torch 1.8",
            {"float32": 15.7, "half": 125}, 900, "NVIDIA V100 data sheet",
        ),
        _card(
            "a10", "NVIDIA A10", (8, 6), 21.99 * GIB, _RAISED + ", torch 2.0",
            {"float32": 31.2, "tf32": 62.5, "half": 125}, 600, "NVIDIA A10 data sheet",
        ),
        _card(
            "l4", "NVIDIA L4", (8, 9), 22.03 * GIB, _RAISED + ", 2025",
            {"float32": 30.3, "tf32": 60, "half": 121}, 300, "NVIDIA L4 data sheet, half of those with sparsity",
        ),
        _card(
            "a10g", "NVIDIA A10G", (8, 6), 22587 * MIB, _PRINTED + ", torch 2.15",
            {"float32": 31.5, "tf32": 35, "half": 70}, 600, "cloud vendors' comparisons with the A10; no data sheet",
        ),
        _card(
            "rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.52 * GIB, _RAISED + ", 2026",
            {"float32": 82.6, "tf32": 82.6, "half": 165.2}, 1008, "NVIDIA Ada architecture white paper",
        ),
        _card(
            "rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 23.56 * GIB, _RAISED + ", torch 2.10",
            {"float32": 35.6, "tf32": 35.6, "half": 71}, 936, "NVIDIA GA102 architecture white paper",
        ),
        _card(
            "rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 31.36 * GIB, _RAISED + ", 2025",
            {"float32": 104.8, "tf32": 104.8, "half": 209.5}, 1792, "NVIDIA RTX Blackwell architecture white paper",
        ),
        _card(
            "v100-32gb", "Tesla V100-SXM2-32GB", (7, 0), 32494 * MIB, _PRINTED + ", torch 2.6",
            {"float32": 15.7, "half": 125}, 900, "NVIDIA V100 data sheet",
        ),
        _card(
            "a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 39.50 * GIB, _RAISED + ", 2025",
            {"float32": 19.5, "tf32": 156, "half": 312}, 1555, "NVIDIA A100 data sheet",
        ),
        _card(
            "l40s", "NVIDIA L40S", (8, 9), 44.39 * GIB, _RAISED,
            {"float32": 91.6, "tf32": 183, "half": 362.05}, 864, "NVIDIA L40S data sheet",
        ),
        _card(
            "h100-pcie", "NVIDIA H100 PCIe", (9, 0), 81008 * MIB, _PRINTED,
            {"float32": 51.2, "tf32": 378, "half": 756}, 2000, "NVIDIA H100 data sheet, half of those with sparsity",
        ),
        _card(
            "h100", "NVIDIA H100 80GB HBM3", (9, 0), 85_017_493_504, "measured: torch 2.11",
            {"float32": 66.9, "tf32": 494.7, "half": 989.4}, 3350, "NVIDIA H100 architecture white paper, data sheet",
            context_from="measured: torch 2.11, CUDA 13.0",
        ),
        _card(
            "a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 79.25 * GIB, _RAISED + ", 2025",
            {"float32": 19.5, "tf32": 156, "half": 312}, 2039, "NVIDIA A100 data sheet",
        ),
        _card(
            "h200", "NVIDIA H200", (9, 0), 143156 * MIB, _PRINTED + ", torch 2.11",
            {"float32": 66.9, "tf32": 494.7, "half": 989.4}, 4800, "NVIDIA H200 data sheet, with the rates of an H100",
        ),
        _card(
            "b200", "NVIDIA B200", (10, 0), 182631 * MIB, _PRINTED + ", torch 2.8",
            {"float32": 75, "tf32": 1125, "half": 2250}, 8000, "NVIDIA HGX B200 data sheet, an eighth of its sums",
        ),
    )
}  # fmt: skip
