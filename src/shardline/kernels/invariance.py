"""Batch-invariant mode: a row's result has the same bits whatever else is computed with it.

    with batch_invariant():
        logits_BTV = decoder(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())

Floating-point sums depend on their order, and a library may order a row's sum by how many rows it gets (MKL's sgemm
does below 10 rows); vectorised functions treat the last few elements of a tensor differently. In the mode, products
run in tiles of a few fixed numbers of rows, padded with zeros. A number of rows is used for a shape only after it was
seen to give the bits of tiles of 16 at every place of the tile; where not even those are alike at every place, rows go
one by one. Elementwise functions run in slabs whose rows all lie alike. What a norm or softmax does to a row is
independent of other rows in PyTorch already, and tests hold it to that.

The mode belongs to a thread. Compiled modules run eagerly in it. Shapes: R rows, K what is summed over, N outputs, X
matrices of a batch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "batch_invariant",
    "fixed_bmm",
    "fixed_linear",
    "fixed_product",
    "is_batch_invariant",
    "proven_sizes",
    "rowwise",
]

_REFERENCE = 16
_SIZES = (4, 8, _REFERENCE, 32, 48, 64, 96, 128, 192, 256)
_SLAB = 32_768 - 64  # elements; fewer than PyTorch deals out to threads
_ALIGNED = 64  # elements; a row of a multiple of it has no tail in any vector width

Product = Callable[[Tensor], Tensor]

_state = threading.local()
_sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
_is_place_free: dict[tuple[object, ...], bool] = {}


@contextmanager
def batch_invariant() -> Generator[None]:
    """Everything that `kernels` computes in this thread is batch-invariant inside."""
    # Nothing can be compiled where dynamo isn't even loaded, and loading it takes a second.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    _state.depth = getattr(_state, "depth", 0) + 1
    try:
        with eager:
            yield
    finally:
        _state.depth -= 1


def is_batch_invariant() -> bool:
    """Returns whether this thread is in the mode."""
    return not torch.compiler.is_compiling() and getattr(_state, "depth", 0) > 0


def fixed_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Returns x W^T + b, [..., N], every row's sum in the same order."""
    x_RK = x.reshape(-1, x.shape[-1])
    out_RN = _in_tiles(x_RK, proven_sizes(weight_NK), lambda tile: F.linear(tile, weight_NK))
    if bias_N is not None:
        out_RN = out_RN + bias_N
    return out_RN.view(*x.shape[:-1], weight_NK.shape[0])


def fixed_bmm(a_XRK: Tensor, b_XKN: Tensor) -> Tensor:
    """Returns the products of X pairs of matrices, every row's sum in the same order whatever X and R are."""
    key = "bmm", *b_XKN.shape[1:], a_XRK.dtype, torch.get_num_threads()
    if key not in _sizes:
        _sizes[key] = _prove_bmm(b_XKN)
    return _in_tiles(a_XRK, _sizes[key], lambda tile: torch.bmm(tile, b_XKN))


def fixed_product(x: Tensor, product: Product, *, key: tuple[object, ...]) -> Tensor:
    """Returns `product(x)`, [..., N], for another kernel than `linear`'s; `key` names the kernel and its shape."""
    key = *key, x.dtype, torch.get_num_threads()
    x_RK = x.reshape(-1, x.shape[-1])
    if key not in _sizes:
        with torch.no_grad():
            _sizes[key] = _prove(_sample((max(_SIZES), x.shape[-1]), x), product)
    return _in_tiles(x_RK, _sizes[key], product).unflatten(0, x.shape[:-1])


def proven_sizes(weight_NK: Tensor) -> tuple[int, ...]:
    """Returns the numbers of rows that give the same bits for a weight of this shape; proves them at the first call."""
    key = *weight_NK.shape, weight_NK.dtype, weight_NK.device, torch.get_num_threads()
    if key not in _sizes:
        sample_RK = _sample((max(_SIZES), weight_NK.shape[1]), weight_NK)
        copy_NK = _shifted(weight_NK)

        def product(x: Tensor) -> Tensor:
            return F.linear(x, weight_NK)

        with torch.no_grad():
            is_free = torch.equal(product(sample_RK[:_REFERENCE])[:, : len(copy_NK)], F.linear(sample_RK[:16], copy_NK))
            _sizes[key] = _prove(sample_RK, product) if is_free else (1,)
    return _sizes[key]


def rowwise(function: Product, x: Tensor) -> Tensor:
    """Returns `function(x)`, elementwise; in the mode an element's bits don't depend on its place in the tensor."""
    if not is_batch_invariant() or _ignores_place(function, x):
        return function(x)
    length = x.shape[-1]
    x_RL = F.pad(x.reshape(-1, length), (0, -length % _ALIGNED))
    num_rows = max(1, _SLAB // x_RL.shape[1])
    slabs = [function(slab) for slab in x_RL.split(num_rows)] or [x_RL]
    return torch.cat(slabs)[:, :length].reshape(x.shape)


def _in_tiles(a: Tensor, sizes: tuple[int, ...], product: Product) -> Tensor:
    """Runs `product` over tiles of rows (the last dim but one): the fewest that `sizes` allow, padded with zeros."""
    num_rows = a.shape[-2]
    pieces = []
    first = 0
    while first < num_rows or not pieces:
        rest = num_rows - first
        size = next((size for size in sizes if size >= rest), sizes[-1])
        tile = a[..., first : first + size, :]
        tile = F.pad(tile, (0, 0, 0, size - rest)) if size > rest else tile.contiguous()
        piece = product(tile)
        pieces.append(piece[..., :rest, :] if size > rest else piece)
        first += size
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2)


def _prove(sample: Tensor, product: Product) -> tuple[int, ...]:
    """Returns the sizes of tiles that give every row the bits that it has in a tile of 16."""
    expected = torch.cat([product(tile.contiguous()) for tile in sample.split(_REFERENCE, dim=-2)], dim=-2)
    for row in (0, _REFERENCE - 1):
        copies = sample[..., row : row + 1, :].expand(*sample.shape[:-2], _REFERENCE, -1).contiguous()
        if not torch.equal(product(copies), expected[..., row : row + 1, :].expand(*expected.shape[:-2], 16, -1)):
            return (1,)
    return tuple(
        size for size in _SIZES if torch.equal(product(sample[..., :size, :].contiguous()), expected[..., :size, :])
    )


def _prove_bmm(like_XKN: Tensor) -> tuple[int, ...]:
    """As `_prove`, and the matrices of a batch must not matter to each other."""
    num_summed, num_out = like_XKN.shape[1:]
    transposed = like_XKN.stride(-1) != 1  # a library may read it in another way
    shape = (num_out, num_summed) if transposed else (num_summed, num_out)
    with torch.no_grad():
        b = _sample((33, *shape), like_XKN)
        b = b.transpose(1, 2) if transposed else b
        sample = _sample((33, max(_SIZES), num_summed), like_XKN)
        sixteen = sample[:, :_REFERENCE].contiguous()
        expected = torch.bmm(sixteen, b)
        for count in (1, 2, 8):
            if not torch.equal(torch.bmm(sixteen[:count], b[:count]), expected[:count]):
                return (1,)
        return _prove(sample[:3], lambda tile: torch.bmm(tile, b[:3]))


def _ignores_place(function: Product, x: Tensor) -> bool:
    key = function, x.dtype, torch.get_num_threads()
    if key not in _is_place_free:
        sample = 4 * _sample((70_001,), x)
        whole = function(sample)
        lengths = (*range(1, 200), 32_769, 65_537)
        _is_place_free[key] = all(torch.equal(function(sample[:n].clone()), whole[:n]) for n in lengths)
    return _is_place_free[key]


def _sample(shape: tuple[int, ...], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


def _shifted(weight_NK: Tensor) -> Tensor:
    """Returns a copy of the first rows that lies elsewhere relative to vectors and cache lines."""
    part = weight_NK.detach()[:256]
    buffer = torch.empty(part.numel() + 1, dtype=part.dtype, device=part.device)
    return buffer[1:].view(part.shape).copy_(part)
