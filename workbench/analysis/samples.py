"""Queries and keys to look at patterns with: a smooth random field, and the patches of a photograph.

Both are grids of tokens, laid out row by row: a token is like its neighbours, as in pictures, maps and slides.
"""

import numpy as np
import torch
from torch import Tensor


def field(shape: tuple[int, int], channels: int = 64, seed: int = 0) -> Tensor:
    """float32 (rows, cols, channels): Gaussian noise, smoothed over a cell in each direction."""
    return _blurred(torch.randn(*shape, channels, generator=torch.Generator().manual_seed(seed)), 1)


def photograph(shape: tuple[int, int]) -> Tensor:
    """float32 (rows, cols, pixels * 3) in [0, 1]: patches of matplotlib's sample portrait of Grace Hopper, halved."""
    from matplotlib.cbook import get_sample_data
    from matplotlib.pyplot import imread

    with get_sample_data("grace_hopper.jpg") as file:
        picture = torch.from_numpy(np.array(imread(file, format="jpg"))).float() / 255  # (height, width, 3)
    picture = torch.nn.functional.avg_pool2d(picture.permute(2, 0, 1), 2).permute(1, 2, 0)
    rows, cols = shape
    high, wide = picture.shape[0] // rows, picture.shape[1] // cols
    if not high or not wide:
        raise ValueError(f"shape={shape}: want at most {tuple(picture.shape[:2])}, a pixel a patch")
    patches = picture[: rows * high, : cols * wide].unflatten(1, (cols, wide)).unflatten(0, (rows, high))
    return patches.permute(0, 2, 1, 3, 4).flatten(2)


def tokens(features: Tensor, heads: int, head_dim: int) -> Tensor:
    """float32 (1, N, heads, head_dim): one vector a cell of (rows, cols, channels), to be used as queries and as keys.

    Head h sees the grid blurred over 2^h / 2 cells, as its first head_dim principal components, half whitened so that
    fine differences count beside light and dark; every vector is normalised as LayerNorm does.
    """
    most = min(features.shape[2], features.shape[0] * features.shape[1])
    if head_dim > most:
        raise ValueError(f"head_dim={head_dim}: want at most {most}, the channels or cells of {tuple(features.shape)}")
    out = []
    for h in range(heads):
        flat = _blurred(features, 2**h / 2).flatten(0, 1)
        u, s, _ = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
        out.append(u[:, :head_dim] * s[:head_dim].sqrt())
    return torch.nn.functional.layer_norm(torch.stack(out, 1), (head_dim,), eps=1e-12)[None]


def _blurred(features: Tensor, sigma: float) -> Tensor:
    rows, cols, _ = features.shape
    return torch.einsum("ax,by,xyc->abc", _weights(rows, sigma), _weights(cols, sigma), features)


def _weights(size: int, sigma: float) -> Tensor:
    """(size, size): rows are Gaussian weights, normalised at the border too."""
    x = torch.arange(size, dtype=torch.float32)
    return torch.softmax(-((x[:, None] - x) ** 2) / (2 * sigma**2), -1)
