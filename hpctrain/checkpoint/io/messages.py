"""Exchange JSON and tensors between the ranks of a process group.

torch's object collectives unpickle received data, which may run code. These functions never unpickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import RendezvousError, UserError
from hpctrain.files import parse_json_object

#: Maximum length of a message without tensors.
MAX_MESSAGE_BYTES = 1 << 28
_ARRAY_KINDS = "biufc"


def gather(
    group: dist.ProcessGroup, value: Any, *, to: int | None = None, label: str = "a message"
) -> list[Any]:
    """Collective. Return the values of all members, in order."""
    own_text, own_tensors = _pack(value, label)
    texts = _gather_texts(group, own_text, to, label)
    if to is not None:
        return [_unpack(text, [], label) for text in texts] or [None] * group.size()
    return [
        _unpack(text, list(_tensors(group, text, src, own_tensors, label)), label)
        for src, text in enumerate(texts)
    ]


def broadcast(group: dist.ProcessGroup, value: Any, *, src: int, label: str = "a message") -> Any:
    """Collective. Return the value of the member with group rank `src`."""
    is_sender = dist.get_rank(group) == src
    own_text, own_tensors = _pack(value if is_sender else None, label)
    size = torch.tensor(len(own_text))
    dist.broadcast(size, group=group, group_src=src)
    length = _checked_length(size, label)
    buffer = _buffer(own_text if is_sender else b"", length)
    dist.broadcast(buffer, group=group, group_src=src)
    text = buffer.numpy().tobytes()
    return _unpack(text, list(_tensors(group, text, src, own_tensors, label)), label)


def _pack(value: Any, label: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return the JSON and the tensors of a value; one that cannot be sent becomes an error on all members."""
    tensors: list[torch.Tensor] = []
    try:
        record: dict[str, Any] = {"value": _encode(value, tensors)}
    except (TypeError, RecursionError) as error:
        tensors, record = [], {"error": f"{label} cannot be sent to other ranks: {error}"}
    record["tensors"] = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    text = json.dumps(record).encode("ascii")
    if len(text) > MAX_MESSAGE_BYTES:
        problem = (
            f"{label} is {len(text)} bytes long on one rank, but the limit is {MAX_MESSAGE_BYTES} bytes. "
            "Use tensors instead of long lists."
        )
        return json.dumps({"error": problem}).encode("ascii"), []
    return text, tensors


def _unpack(text: bytes, tensors: list[torch.Tensor], label: str) -> Any:
    record = _parse(text, label)
    if "error" in record:
        raise UserError(record["error"])
    try:
        return _decode(record["value"], tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise RendezvousError(f"{label} was received in an invalid form: {error!r}") from error


def _parse(text: bytes, label: str) -> dict[str, Any]:
    try:
        return parse_json_object(text, label)
    except ValueError as error:
        raise RendezvousError(f"{label} was received in an invalid form: {error}") from error


def _encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(item, tensors) for item in value]
    if kind is tuple:
        return {"tuple": [_encode(item, tensors) for item in value]}
    if kind is dict:
        return {"dict": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value.detach().cpu().contiguous())
        return {"tensor": len(tensors) - 1}
    if kind is bytes:
        tensors.append(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0))
        return {"bytes": len(tensors) - 1}
    if kind.__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "O") in _ARRAY_KINDS:
        # copy() makes all strides positive.
        tensors.append(torch.as_tensor(value.copy()))
        return {"array" if kind.__name__ == "ndarray" else "number": len(tensors) - 1}
    raise TypeError(
        f"it contains an object of type {kind.__module__}.{kind.__qualname__}. Use only tensors, arrays, "
        "numbers, strings, lists, tuples and dicts"
    )


def _decode(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple(_decode(item, tensors) for item in content)
        case "dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in content}
        case "dtype":
            return _dtype(content)
        case "tensor":
            return tensors[content]
        case "bytes":
            return tensors[content].numpy().tobytes()
        case "array":
            return tensors[content].numpy()
        case "number":
            return tensors[content].numpy()[()]
    raise ValueError(f"unknown kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def _tensors(
    group: dist.ProcessGroup, text: bytes, src: int, sent: Sequence[torch.Tensor], label: str
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a message from member `src`."""
    is_sender = dist.get_rank(group) == src
    for index, (name, shape) in enumerate(_parse(text, label).get("tensors", [])):
        tensor = sent[index] if is_sender else torch.empty(shape, dtype=_dtype(name))
        if tensor.numel():
            # Sent as bytes, because gloo does not support all dtypes.
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            dist.broadcast(flat.reshape(-1).view(torch.uint8), group=group, group_src=src)
        yield tensor


def _gather_texts(group: dist.ProcessGroup, text: bytes, to: int | None, label: str) -> list[bytes]:
    """Return the JSON of all members; an empty list on members that receive none."""
    size = group.size()
    sizes = [torch.tensor(0) for _ in range(size)]
    dist.all_gather(sizes, torch.tensor(len(text)), group=group)
    lengths = [_checked_length(received, label) for received in sizes]
    longest = max(lengths)
    buffers = [_buffer(b"", longest) for _ in range(size)] if to in (None, dist.get_rank(group)) else []
    if to is None:
        dist.all_gather(buffers, _buffer(text, longest), group=group)
    else:
        dist.gather(_buffer(text, longest), buffers or None, group=group, group_dst=to)
    return [buffer[:length].numpy().tobytes() for buffer, length in zip(buffers, lengths, strict=False)]


def _checked_length(size: torch.Tensor, label: str) -> int:
    length = int(size)
    if not 0 < length <= MAX_MESSAGE_BYTES:
        raise RendezvousError(f"{label} is {length} bytes long, but the limit is {MAX_MESSAGE_BYTES} bytes")
    return length


def _buffer(text: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.ljust(length, b"\0")), dtype=torch.uint8)
