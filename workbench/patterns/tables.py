"""How long the tables that are kept with patterns stay, and who finds them.

Lists of blocks take milliseconds to seconds to make. Documents of several lengths ask for those of each, in turn; and a
pattern is often written where it is used, so that every call makes one that is equal to the last call's.
"""

from dataclasses import is_dataclass

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

SIZES, ROOM = 16, 1 << 27  # tables of so many sizes stay with a pattern, and the earlier ones of so many bytes
EQUAL: dict[tuple, dict] = {}  # the tables of the last patterns of which a few numbers say all, by class and writing


def of_equal(written: tuple, own: dict) -> dict:
    """The tables of a pattern that is written so; under a tracer, or with fake tensors, those that it has."""
    if traced() or torch._C._len_torch_dispatch_stack():
        return own
    if written not in EQUAL:
        make_room(EQUAL)
    EQUAL[written] = found = EQUAL.pop(written, own)
    return found


def make_room(held: dict) -> None:
    """Drop the tables that were used longest ago until another one may be made."""
    while held and (len(held) >= SIZES or weight([*held.values()]) > ROOM):
        for oldest in [*held][:1]:
            held.pop(oldest, None)  # another thread, of torch's DataParallel, may have dropped it


def weight(x) -> int:
    """Bytes of the tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(x, Tensor):
        return x.nbytes
    x = vars(x) if is_dataclass(x) else x
    x = [*x.values()] if isinstance(x, dict) else x
    return sum(map(weight, x)) if isinstance(x, (tuple, list)) else 0


def place(x: Tensor) -> tuple:
    """Where a table for x is: on its device, and whose if a tracer is on, in which tensors have no contents."""
    return str(x.device), *traced()


def traced() -> list:
    """The modes of torch that are more than a default device."""
    return [x for x in _get_current_function_mode_stack() if not isinstance(x, DeviceContext)]
