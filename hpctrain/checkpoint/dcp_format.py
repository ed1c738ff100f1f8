"""The table of what lies where: once for `torch.distributed.checkpoint`, and once as JSON for ourselves.

torch's own table, `.metadata`, is a pickle, which may run code when it is read. It is written for those who
read a checkpoint without hpctrain; hpctrain reads `tensors.json`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpctrain.checkpoint.image import Image

METADATA_NAME = ".metadata"
TENSORS_NAME = "tensors.json"


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor in a file."""

    key: str
    dtype: str
    """torch's name of the type of its elements, without `torch.`."""
    whole: tuple[int, ...]
    """Size of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


def file_name(rank: int) -> str:
    """The name that torch gives to the first file of a rank."""
    return f"__{rank}_0.distcp"


def stored(image: Image, rank: int) -> list[Stored]:
    """What lies where in the file of a rank."""
    return [
        Stored(
            piece.key,
            str(piece.dtype).removeprefix("torch."),
            piece.whole,
            piece.offsets,
            piece.sizes,
            file_name(rank),
            span.offset,
            span.length,
        )
        for piece, span in zip(image.pieces, image.spans, strict=True)
    ]


def tables(everything: Iterable[Stored]) -> dict[str, bytes]:
    """The two tables of a checkpoint, by the names of their files."""
    record: dict[str, Any] = {}
    for item in everything:
        entry = record.setdefault(item.key, {"dtype": item.dtype, "size": item.whole, "pieces": []})
        entry["pieces"].append((item.offsets, item.sizes, item.file, item.offset, item.length))
    text = json.dumps(record)
    return {
        METADATA_NAME: pickle.dumps(_metadata(json.loads(text))),
        TENSORS_NAME: f"{text}\n".encode("ascii"),
    }


def _metadata(record: dict[str, Any]) -> Metadata:
    tensors, places = {}, {}
    for key, entry in record.items():
        chunks = []
        for i, (offsets, sizes, file, offset, length) in enumerate(entry["pieces"]):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(key, offsets, i)] = _StorageInfo(file, offset, length)
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    # torch reads the table as a map that may also hold what is no tensor; we have none such.
    return Metadata(dict(tensors), storage_data=places, version=CURRENT_DCP_VERSION)


class TensorReader(FileSystemReader):
    """Reads the tensors of a checkpoint; unpickles nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = _metadata(json.loads((folder / TENSORS_NAME).read_bytes()))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.table

    def keys(self, prefixes: Sequence[str]) -> list[str]:
        """The keys that begin with one of `prefixes`."""
        return [key for key in self.table.state_dict_metadata if key.startswith(tuple(prefixes))]

    def empty(self, key: str) -> torch.Tensor:
        """A tensor of the type and size of that of `key`, on the CPU."""
        entry = self.table.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(entry.size, dtype=entry.properties.dtype)
