"""Messages between the ranks of a process group: authenticated JSON, with tensors sent separately.

torch's object collectives unpickle received data, and torch does not authenticate connections. The ranks
therefore first authenticate each other with the secret of their attempt, and never unpickle received
messages.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hpctrain.authentication import CODE_BYTES, code, matches
from hpctrain.errors import RendezvousError, Unauthenticated, UserError
from hpctrain.text import format_ranks

#: Maximum length of a message without tensors.
MAX_MESSAGE_BYTES = 1 << 28
#: All ranks finish forming a group within seconds of each other.
_PROOF_LIMIT = timedelta(seconds=60)
_ARRAY_KINDS = "biufc"
_LENGTH_BYTES = 8


@dataclass
class _Session:
    """The key that the ranks of a group agreed on during authentication."""

    key: bytes
    count: int = 0


_sessions: WeakKeyDictionary[dist.ProcessGroup, _Session] = WeakKeyDictionary()
#: The secret for all groups. Global like torch's default group.
_secret = b""
#: Describes the store of the ranks, for errors.
_describe_store: Callable[[], str] = str


def prove_world(secret: bytes, describe_store: Callable[[], str] = str) -> None:
    """Authenticate the default group with `secret`; later groups use it, too. All ranks must call this.

    Args:
        secret: the secret of the attempt.
        describe_store: describes the store of the ranks, for errors.

    Raises:
        RendezvousError: a rank did not respond in time, or closed a connection.
        Unauthenticated: a rank did not prove the secret.
    """
    global _secret, _describe_store
    _secret, _describe_store = secret, describe_store
    prove(dist.group.WORLD)


def new_group(members: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
    """Return a group from `torch.distributed.new_group` whose members authenticate each other.

    Raises:
        RendezvousError: a member did not answer in time, or closed a connection.
        Unauthenticated: a member did not prove the secret.
    """
    with _forming(range(dist.get_world_size()) if members is None else members, "join a process group"):
        group: dist.ProcessGroup = dist.new_group(members, **options)
    if members is None or dist.get_rank() in members:
        prove(group)
    return group


def prove(group: dist.ProcessGroup | None) -> _Session:
    """Authenticate the members with the secret, once. All members must call this.

    Every member sends a nonce. The proof is a code over all nonces and the member's own rank, so it cannot be
    replayed or sent back.

    Raises:
        RendezvousError: a member did not answer in time, or closed a connection.
        Unauthenticated: a member did not prove the secret.
    """
    assert group is not None
    if (known := _sessions.get(group)) is not None:
        return known
    with _forming(dist.get_process_group_ranks(group), "authenticate"):
        return _sessions.setdefault(group, _proven(group))


@contextmanager
def _forming(members: Sequence[int], step: str) -> Iterator[None]:
    """Convert torch's errors, and add the missing ranks and the store."""
    begun, own = time.monotonic(), dist.get_rank()
    try:
        yield
    except Unauthenticated as error:
        raise Unauthenticated(_with_store(str(error))) from error
    except RuntimeError as error:
        others = format_ranks([rank for rank in members if rank != own])
        raise RendezvousError(
            _with_store(f"rank {own} waited {time.monotonic() - begun:.0f} s for {others} to {step}: {error}")
        ) from error


def _with_store(text: str) -> str:
    return f"{text} ({words})" if (words := _describe_store()) else text


def _proven(group: dist.ProcessGroup) -> _Session:
    members, own = dist.get_process_group_ranks(group), dist.get_rank(group)
    key = b""
    for device in _devices(group):
        nonces = _exchange(group, device, secrets.token_bytes(CODE_BYTES))
        agreed = code(_secret, "group", members, device.type, *nonces)
        proofs = _exchange(group, device, code(agreed, "member", own))
        foreign = [
            rank
            for index, (rank, proof) in enumerate(zip(members, proofs, strict=True))
            if not matches(proof, code(agreed, "member", index))
        ]
        if foreign:
            raise Unauthenticated(
                f"{format_ranks(foreign)} of {dist.get_world_size()} did not authenticate with the secret "
                "of this run: another program connected instead, or the processes have different values of "
                "HPCTRAIN_SECRET"
            )
        key = key or code(agreed, "messages")
    return _Session(key)


def gather(
    group: dist.ProcessGroup, value: Any, *, to: int | None = None, what: str = "a message"
) -> list[Any]:
    """Return the values of all members, in order. All members must call this.

    Args:
        group: the process group, which must have a CPU backend.
        value: None, bool, int, float, str, bytes, list, tuple, dict, torch.dtype, tensor, NumPy array or
            number, nested to any depth. Tensors arrive on the CPU.
        to: group rank of the only member that receives the values; None for all members. Other members
            receive None for each value. In this case, the values must not contain tensors, arrays or bytes.
        what: name of the value in errors.

    Raises:
        UserError: on all receiving members: a value has an unsupported type or is too long.
        Unauthenticated: a message has a wrong code.
    """
    own = dist.get_rank(group)
    packed = _pack(value, what)
    messages = _send_all(group, packed.text, what, to)
    if to is not None:
        return [_unpack(text, [], what) for text in messages] if own == to else [None] * group.size()
    return [
        _unpack(text, list(_tensors(group, text, index, packed.tensors)), what)
        for index, text in enumerate(messages)
    ]


def broadcast(group: dist.ProcessGroup, value: Any, *, src: int, what: str = "a message") -> Any:
    """Return the value of the member with group rank `src`. All members must call this. See `gather`.

    Raises:
        UserError: on all members: the value has an unsupported type or is too long.
        Unauthenticated: the message has a wrong code.
    """
    packed = _pack(value if dist.get_rank(group) == src else None, what)
    text = _send_one(group, packed.text, what, src)
    return _unpack(text, list(_tensors(group, text, src, packed.tensors)), what)


def _devices(group: dist.ProcessGroup) -> list[torch.device]:
    """Return one device type per backend, identical on all members."""
    backends = {
        group._get_backend(device).name(): device
        for device in sorted(group._device_types, key=lambda device: device.type, reverse=True)
    }
    return [backends[name] for name in sorted(backends)]


@dataclass
class _Packed:
    """A value, split into JSON and tensors."""

    text: bytes
    tensors: list[torch.Tensor]


def _pack(value: Any, what: str) -> _Packed:
    """Pack a value. A value that cannot be sent becomes an error on all members."""
    tensors: list[torch.Tensor] = []
    try:
        record: dict[str, Any] = {"value": _encode(value, tensors)}
    except (TypeError, RecursionError) as error:
        tensors, record = [], {"error": f"{what} cannot be sent to other ranks: {error}"}
    record["tensors"] = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    text = json.dumps(record).encode("ascii")
    if len(text) > MAX_MESSAGE_BYTES:
        problem = (
            f"{what} is {len(text)} bytes long on one rank, but the limit is {MAX_MESSAGE_BYTES} bytes. "
            "Use tensors instead of long lists."
        )
        return _Packed(json.dumps({"error": problem}).encode("ascii"), [])
    return _Packed(text, tensors)


def _unpack(text: bytes, tensors: list[torch.Tensor], what: str) -> Any:
    record = _parse(text, what)
    if "error" in record:
        raise UserError(record["error"])
    try:
        return _decode(record["value"], tensors)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Unauthenticated(f"{what} was received in an invalid form: {error!r}") from error


def _parse(text: bytes, what: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unauthenticated(f"{what} was received in an invalid form: {error!r}") from error
    if not isinstance(record, dict):
        raise Unauthenticated(f"{what} was received in an invalid form")
    return record


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
    group: dist.ProcessGroup, text: bytes, src: int, own: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the tensors of a message from member `src`."""
    sends = dist.get_rank(group) == src
    for index, (name, shape) in enumerate(_parse(text, "a message").get("tensors", [])):
        tensor = own[index] if sends else torch.empty(shape, dtype=_dtype(name))
        if tensor.numel():
            # Sent as bytes, because gloo does not support all dtypes.
            flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            dist.broadcast(flat.reshape(-1).view(torch.uint8), group=group, group_src=src)
        yield tensor


def _send_all(group: dist.ProcessGroup, text: bytes, what: str, to: int | None) -> list[bytes]:
    """Return the JSON of all members; an empty list on members that receive none."""
    session, own, size = prove(group), dist.get_rank(group), group.size()
    session.count += 1
    header = _header(session, own, text)
    headers = [torch.empty_like(header) for _ in range(size)]
    dist.all_gather(headers, header, group=group)
    lengths = [_length(session, index, each, what) for index, each in enumerate(headers)]
    packet = _packet(session, own, text, max(lengths))
    if to is None:
        packets = [torch.empty_like(packet) for _ in range(size)]
        dist.all_gather(packets, packet, group=group)
    else:
        packets = [torch.empty_like(packet) for _ in range(size)] if own == to else []
        dist.gather(packet, packets or None, group=group, group_dst=to)
    return [
        _checked(session, index, packet, length, what)
        for index, (packet, length) in enumerate(zip(packets, lengths, strict=False))
    ]


def _send_one(group: dist.ProcessGroup, text: bytes, what: str, src: int) -> bytes:
    session, own = prove(group), dist.get_rank(group)
    session.count += 1
    header = _header(session, own, text)
    dist.broadcast(header, group=group, group_src=src)
    length = _length(session, src, header, what)
    packet = _packet(session, own, text if own == src else b"", length)
    dist.broadcast(packet, group=group, group_src=src)
    return _checked(session, src, packet, length, what)


def _header(session: _Session, own: int, text: bytes) -> torch.Tensor:
    """Return the length of a message with its code, which is sent before the message."""
    data = len(text).to_bytes(_LENGTH_BYTES, "big")
    content = bytearray(data + code(session.key, session.count, own, "length", data))
    return torch.frombuffer(content, dtype=torch.uint8)


def _length(session: _Session, src: int, header: torch.Tensor, what: str) -> int:
    content = header.numpy().tobytes()
    data = content[:_LENGTH_BYTES]
    length = int.from_bytes(data, "big")
    right = matches(content[_LENGTH_BYTES:], code(session.key, session.count, src, "length", data))
    if not right or not 0 < length <= MAX_MESSAGE_BYTES:
        raise Unauthenticated(
            f"the length of {what} from group rank {src} has an invalid authentication code or is out of "
            f"range: {length} bytes, limit {MAX_MESSAGE_BYTES}"
        )
    return length


def _packet(session: _Session, own: int, text: bytes, longest: int) -> torch.Tensor:
    packet = torch.zeros(CODE_BYTES + longest, dtype=torch.uint8)
    content = bytearray(code(session.key, session.count, own, text) + text)
    packet[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
    return packet


def _checked(session: _Session, src: int, packet: torch.Tensor, length: int, what: str) -> bytes:
    data = packet.numpy().tobytes()
    text = data[CODE_BYTES : CODE_BYTES + length]
    if not matches(data[:CODE_BYTES], code(session.key, session.count, src, text)):
        raise Unauthenticated(f"{what} from group rank {src} has an invalid authentication code")
    return text


def _exchange(group: dist.ProcessGroup, device: torch.device, own: bytes) -> list[bytes]:
    """Return the bytes of each member, with the same length on all members."""
    sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    work = dist.all_gather(received, sent, group=group, async_op=True)
    assert work is not None
    work.wait(_PROOF_LIMIT)
    return [each.cpu().numpy().tobytes() for each in received]
