"""Build the tables with the location of each tensor: one for `torch.distributed.checkpoint`, one as JSON.

torch's own table, `.metadata`, is a pickle, which may run code when it is read. This table is only for
readers without hpctrain; hpctrain reads `tensors.json`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpctrain.checkpoint.format.manifest import TENSORS_NAME
from hpctrain.torch_compat import DCP_VERSION, StorageInfo

METADATA_NAME = ".metadata"


@dataclass(frozen=True)
class StoredChunk:
    key: str
    dtype: str
    tensor_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


def rank_file_name(rank: int) -> str:
    """Return the file name that torch uses for the first file of a rank."""
    return f"__{rank}_0.distcp"


def build_tables(everything: Iterable[StoredChunk]) -> dict[str, bytes]:
    record: dict[str, Any] = {}
    for item in everything:
        entry = record.setdefault(item.key, {"dtype": item.dtype, "size": item.tensor_shape, "pieces": []})
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
            places[MetadataIndex(key, offsets, i)] = StorageInfo(file, offset, length)
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[key] = TensorStorageMetadata(properties, torch.Size(entry["size"]), chunks)
    # torch's type also allows entries that are not tensors; these do not occur.
    return Metadata(dict(tensors), storage_data=places, **DCP_VERSION)


class TensorReader(FileSystemReader):
    """Reader for the tensors of a checkpoint, without unpickling."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.table = _metadata(json.loads((folder / TENSORS_NAME).read_bytes()))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.table

    def keys(self, prefixes: Sequence[str]) -> list[str]:
        return [key for key in self.table.state_dict_metadata if key.startswith(tuple(prefixes))]

    def empty(self, key: str) -> torch.Tensor:
        entry = self.table.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(entry.size, dtype=entry.properties.dtype)
