"""The cards that a prediction can be asked for without owning one: their memory, and how fast they are at best.

A figure is as good as its source, which stands beside it.
"""

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
    capability: compute capability, (major, minor). multiprocessors: how many.
    matmul_tflops: {"float32", "tf32", "float16", "bfloat16": 10^12 operations/s}, the vendor's peak, dense, sums in
        float32 as torch has them; what the card has no units for is left out. {} for a card that is not in the table.
    """

    key: str
    name: str
    total_bytes: int
    context_bytes: int
    communicator_bytes: int
    capability: tuple[int, int]
    workspace_bytes: int
    multiprocessors: int
    matmul_tflops: dict[str, float] = field(hash=False)


def find(name: str | Card) -> Card:
    """The card of a key ("h100", "a100-40gb") or of a device's full name ("NVIDIA H100 80GB HBM3"), in any case;
    the family may be left out ("a6000", "4090").

    A Card is returned as it is. ValueError for what is not in the table, and for what could be two cards ("a100").
    """
    if isinstance(name, Card):
        return name
    plain = _plain(name) if isinstance(name, str) else ""
    if plain in _named():
        return _named()[plain]
    near = [key for key in CARDS if plain and plain in _plain(key)]
    if len(near) == 1 and _plain(near[0]).endswith(plain):  # without its family: "4090", "a6000"
        return CARDS[near[0]]
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
        card = _card(_plain(found.name), found.name, capability, total, 0)
    return replace(card, total_bytes=total, multiprocessors=found.multi_processor_count)


def _named() -> dict[str, Card]:
    return {_plain(name): card for card in CARDS.values() for name in (card.key, card.name)}


def _plain(name: str) -> str:
    """'NVIDIA GeForce RTX 4090', 'GeForce RTX 4090' (older drivers) and 'rtx4090' -> 'rtx4090'."""
    return re.sub(r"\b(nvidia|amd|instinct|geforce|tesla)\b|[\W_]", "", name.lower())


def _card(key, name, capability, total, multiprocessors, *tflops) -> Card:
    """One row of the table. tflops: of float32, tf32 where the card has it, and 16 bits.

    bfloat16, where the card has it, is as fast as float16. The context is that of an H100, measured with torch 2.11 and
    CUDA 13.0; what a process group takes, about half a GB, is assumed; cuBLAS's workspace is torch's source's: 32 MiB
    (8.1 MiB past Hopper in versions before 2026), or pools of :4096:2:16:8 KiB.
    """
    kinds = ("float32", "tf32", "float16", "bfloat16") if capability >= (8, 0) else ("float32", "float16")
    return Card(
        key, name, total_bytes=round(total), context_bytes=552_402_944, communicator_bytes=500_000_000,
        capability=capability, workspace_bytes=32 * MIB if capability[0] in (9, 10, 12) else (4096 * 2 + 16 * 8) * 1024,
        multiprocessors=multiprocessors, matmul_tflops=dict(zip(kinds, (*tflops, *tflops[-1:]), strict=False)),
    )  # fmt: skip


# Memory in MiB is of torch's device properties, in GiB of its out-of-memory errors, to 0.01, both as users published
# them, and an H100's is measured. Multiprocessors are of NVIDIA's white papers and data sheets; rates are theirs, too:
CARDS: dict[str, Card] = {row[0]: _card(*row) for row in (
    # white paper; its units for float16 are 64 times slower, so float16 is multiplied in float32
    ("gtx1080", "NVIDIA GeForce GTX 1080", (6, 1), 8118 * MIB, 20, 8.87, 8.87),
    ("rtx3080", "NVIDIA GeForce RTX 3080", (8, 6), 9.78 * GIB, 68, 29.8, 29.8, 59.5),  # GA102 white paper
    ("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 11019 * MIB, 68, 13.4, 53.8),  # white paper, reference clocks
    # computed: 28 multiprocessors at 1.777 GHz by the rates of the GA102 white paper
    ("rtx3060", "NVIDIA GeForce RTX 3060", (8, 6), 11931 * MIB, 28, 12.7, 12.7, 25.5),
    ("t4", "Tesla T4", (7, 5), 15095 * MIB, 40, 8.1, 65),  # data sheet
    ("rtx4080", "NVIDIA GeForce RTX 4080", (8, 9), 15945 * MIB, 76, 48.7, 48.7, 97.5),  # Ada white paper
    ("v100-16gb", "Tesla V100-SXM2-16GB", (7, 0), 16160 * MIB, 80, 15.7, 125),  # data sheet
    ("a10", "NVIDIA A10", (8, 6), 21.99 * GIB, 72, 31.2, 62.5, 125),  # data sheet
    ("l4", "NVIDIA L4", (8, 9), 22.03 * GIB, 58, 30.3, 60, 121),  # data sheet, half of those with sparsity
    ("a10g", "NVIDIA A10G", (8, 6), 22587 * MIB, 80, 31.5, 35, 70),  # cloud vendors' comparisons with the A10
    ("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.52 * GIB, 128, 82.6, 82.6, 165.2),  # Ada white paper
    ("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 23.56 * GIB, 82, 35.6, 35.6, 71),  # GA102 white paper
    ("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 31.36 * GIB, 170, 104.8, 104.8, 209.5),  # RTX Blackwell white paper
    ("v100-32gb", "Tesla V100-SXM2-32GB", (7, 0), 32494 * MIB, 80, 15.7, 125),  # data sheet
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 39.50 * GIB, 108, 19.5, 156, 312),  # data sheet
    ("l40s", "NVIDIA L40S", (8, 9), 44.39 * GIB, 142, 91.6, 183, 362.05),  # data sheet
    ("rtxa6000", "NVIDIA RTX A6000", (8, 6), 47.54 * GIB, 84, 38.7, 77.4, 154.8),  # GA102 white paper
    # data sheet, half of those with sparsity
    ("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 81008 * MIB, 114, 51.2, 378, 756),
    # white paper and data sheet
    ("h100", "NVIDIA H100 80GB HBM3", (9, 0), 85_017_493_504, 132, 66.9, 494.7, 989.4),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 79.25 * GIB, 108, 19.5, 156, 312),  # data sheet
    ("h100-nvl", "NVIDIA H100 NVL", (9, 0), 93.00 * GIB, 132, 60, 417.5, 835.5),  # as h100-pcie
    ("h200", "NVIDIA H200", (9, 0), 143156 * MIB, 132, 66.9, 494.7, 989.4),  # the rates of an H100
    ("b200", "NVIDIA B200", (10, 0), 182631 * MIB, 148, 75, 1125, 2250),  # data sheet of eight, an eighth of its sums
    # its memory alone: what kernels take is taken to be as on an H100, and speeds are not known
    ("mi300x", "AMD Instinct MI300X", (9, 0), 191.98 * GIB, 304),
)}  # fmt: skip
