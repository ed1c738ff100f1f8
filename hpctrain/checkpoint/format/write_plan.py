"""The write plan: the part of each tensor that a rank writes.

Tensors that are replicated on the same ranks are concatenated, in the order of the tree, and divided into one
equal range per rank. Each rank computes its range without communication, and all ranks write about the same
amount. A tensor is split only at the end of a range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpctrain.errors import CheckpointError
from hpctrain.torch_compat import ShardedTensor

#: Minimum size in bytes of tensors to split: for smaller tensors, another piece costs more than it saves.
_CUT_FROM_BYTES = 1 << 20


class WriteItem(NamedTuple):
    """A rectangular region of a tensor, which one rank writes."""

    key: str
    dtype: torch.dtype
    tensor_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Position of the piece in the complete tensor."""
    sizes: tuple[int, ...]


class _LocalPart(NamedTuple):
    """This rank's part of a tensor, and the ranks with the same part."""

    key: str
    tensor_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor
    holders: tuple[int, ...]


def plan_writes(
    tensors: Mapping[str, torch.Tensor], rank: int, world_size: int
) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Yield the pieces that this rank writes, with their data, in an order that depends only on shapes."""
    groups: dict[tuple[int, ...], list[_LocalPart]] = {}
    everyone = tuple(range(world_size))
    for key, tensor in tensors.items():
        for local in _local_parts(key, tensor, rank, everyone):
            groups.setdefault(local.holders, []).append(local)
    for holders, local_parts in groups.items():
        yield from _split_among_holders(local_parts, holders.index(rank), len(holders))


def slice_item(item: WriteItem, tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a piece of `tensor`, which is complete on this rank."""
    data = tensor.detach()
    if item.sizes == item.tensor_shape:
        return data
    for dim, (offset, size) in enumerate(zip(item.offsets, item.sizes, strict=True)):
        data = data.narrow(dim, offset, size)
    return data


def _split_among_holders(
    local_parts: Iterable[_LocalPart], index: int, num_holders: int
) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    local_parts = list(local_parts)
    length = sum(local.data.nbytes for local in local_parts) / num_holders
    begin = 0
    for local in local_parts:
        data, nbytes = local.data, local.data.nbytes
        # Rows are slices along the first dimension of size above 1.
        dim = next((d for d, size in enumerate(data.shape) if size > 1), None)
        rows = 1 if dim is None or nbytes < _CUT_FROM_BYTES else data.shape[dim]

        def row(cut: int, begin: int = begin, nbytes: int = nbytes, rows: int = rows) -> int:
            """Return the first row of range number `cut`."""
            if cut in (0, num_holders):
                return 0 if cut == 0 else rows
            if nbytes == 0:
                return 0 if begin < cut * length else rows
            return min(rows, max(0, round((cut * length - begin) / nbytes * rows)))

        start, end = row(index), row(index + 1)
        begin += nbytes
        if start >= end:
            continue
        offsets = list(local.offsets)
        if dim is not None and end - start < rows:
            offsets[dim] += start
            data = data.narrow(dim, start, end - start)
        yield WriteItem(local.key, data.dtype, local.tensor_shape, tuple(offsets), tuple(data.shape)), data


def _local_parts(
    key: str, tensor: torch.Tensor, rank: int, everyone: tuple[int, ...]
) -> Iterator[_LocalPart]:
    if isinstance(tensor, DTensor):
        yield from _local_part_of_dtensor(key, tensor)
    elif isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            offsets = tuple(shard.metadata.shard_offsets)
            yield _LocalPart(key, tuple(tensor.size()), offsets, _storable(key, shard.tensor), (rank,))
    else:
        data = _storable(key, tensor)
        yield _LocalPart(key, tuple(data.shape), (0,) * data.dim(), data, everyone)


def _local_part_of_dtensor(key: str, tensor: DTensor) -> Iterator[_LocalPart]:
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None:
        return
    if not all(isinstance(placement, (Replicate, Shard)) for placement in tensor.placements):
        raise CheckpointError(
            f"{key} is a DTensor with placements {tensor.placements}, but a checkpoint can store only "
            "Shard and Replicate placements. Call redistribute() first."
        )
    alike = tuple(
        slice(None) if isinstance(placement, Replicate) else slice(at, at + 1)
        for placement, at in zip(tensor.placements, place, strict=True)
    )
    holders = tuple(sorted(mesh.mesh[alike].flatten().tolist()))
    data = _storable(key, tensor.to_local())
    for chunk in tensor.__create_chunk_list__():  # type: ignore[no-untyped-call] # torch's protocol
        yield _LocalPart(key, tuple(tensor.shape), tuple(chunk.offsets), data, holders)


def _storable(key: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise CheckpointError(
            f"{key} has layout {tensor.layout} and dtype {tensor.dtype} on device {tensor.device}, which a "
            "checkpoint cannot store. Save only dense, unquantized tensors that are not on the meta device."
        )
    return tensor.detach()


def item_bytes(item: WriteItem) -> int:
    return math.prod(item.sizes) * item.dtype.itemsize
