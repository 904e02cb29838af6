"""The replica of torch's caching allocator beside the allocator itself: random programs, compared at every step."""

import gc
import random

import pytest
import torch

from workbench.fit.allocator import Allocator, OutOfMemory

MIB = 1 << 20
STEPS = 2000


@pytest.fixture
def card(request):
    """The limit that is in force, or None; nothing is cached."""
    limit = request.param
    torch.zeros(1, device="cuda")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if limit is not None:  # of what is taken from here on; half a MiB more: no segment ends there
        before, total = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((before + limit + MIB // 2) / total)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def size(draw):
    """1 B to 64 MiB: mostly of any magnitude, often one of a few sizes or at a border."""
    kind = draw.random()
    if kind < 0.5:
        return int(2 ** draw.uniform(0, 26))
    if kind < 0.75:
        return draw.choice([512, 4096, 100_000, 3 * MIB, 8 * MIB, 16 * MIB, 33 * MIB])
    border = draw.choice([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 64 * MIB - 1])
    return border + draw.choice([-512, -1, 0, 1, 512]) if border < 64 * MIB - 1 else border


def real():
    stats = torch.cuda.memory_stats()
    return [stats[f"{what}_bytes.all.current"] for what in ("requested", "allocated", "reserved")]


def program(replica, seed):
    """Run a program on the card and on the replica; yields (the card's numbers, the replica's) after each step."""
    draw, alive, before = random.Random(seed), [], real()
    for _ in range(STEPS):
        what = draw.random()
        if alive and what < 0.45:
            tensor, block = alive.pop(draw.randrange(len(alive)))
            del tensor
            replica.free(block)
        elif what < 0.99:
            nbytes = size(draw)
            try:
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                with pytest.raises(OutOfMemory):
                    replica.malloc(nbytes)
            else:
                replica.top = tensor.data_ptr()  # a new segment is where the driver put the real one
                alive.append((tensor, replica.malloc(nbytes)))
                del tensor
        else:
            torch.cuda.empty_cache()
            replica.empty_cache()
        of_replica = [replica.requested, replica.allocated, replica.reserved]
        yield [a - b for a, b in zip(real(), before, strict=True)], of_replica


@pytest.mark.parametrize("card", [None, 256 * MIB, 512 * MIB], indirect=True)
def test_equal_at_each_step(card):
    replica = Allocator(None if card is None else card + MIB // 2)
    for step, (card_says, replica_says) in enumerate(program(replica, card or 0)):
        assert card_says == replica_says, f"step {step}"
