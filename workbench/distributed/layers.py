"""Layers over sharded attention."""

import copy

import torch
from torch import Tensor

from workbench.distributed.api import attention
from workbench.distributed.group import Ranks
from workbench.engines import layers


class MultiheadAttention(layers.MultiheadAttention):
    """`workbench.MultiheadAttention` whose sequence is spread over ranks: x (B, L, embed_dim) -> (B, L, embed_dim).

    x: this rank's contiguous rows, shards in the order of ranks; L may differ between ranks and be 0. The result is
    what one device gives for these rows. With a `key`, the query holds the queries among this rank's positions
    (see `workbench.MultiheadAttention`).
    group: a process group, e.g. `init_device_mesh(...).get_group("sequence")`; None: all ranks, or a single one.
    strategy: as in `workbench.distributed.attention`. Other arguments, parameters and their names are those of
    `workbench.MultiheadAttention`, so that a state_dict fits both.

    rope: positions are those in the whole sequence, for which ranks tell each other how many rows they have.

    Each rank has a copy of the parameters, which get the gradient of its rows only: `training` says how to sum them.
    All ranks of the group call this, and its backward, together. Dropout is drawn on each rank: seed ranks differently.
    A deepcopy is on the same group. A process group cannot be pickled: save the state_dict.
    """

    def __init__(self, embed_dim, num_heads, pattern, *, group=None, strategy="auto", **options):
        super().__init__(embed_dim, num_heads, pattern, **options)
        self.group, self.strategy = group, strategy

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return attention(q, k, v, self.pattern, self.group, self.strategy, backend=self.backend, **options)

    def rotation(self, n: int, device=None, cache=None) -> Tensor:
        ranks = Ranks.of(self.group)
        each = [rows for (rows,) in ranks.gather(("rows",), [n]).wait()] if ranks.world > 1 else [n]
        first = sum(each[: ranks.rank])
        return self._table(torch.arange(first, first + n, device=device), sum(each))  # all refuse what is too long

    def forward(self, query: Tensor, *keys, cache=None, **options):
        if cache is not None:
            raise ValueError("a cache over ranks: want a layer of one device to decode with, which has the state_dict")
        return super().forward(query, *keys, **options)

    def __deepcopy__(self, memo):
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = self.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin
