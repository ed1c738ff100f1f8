"""Rank 0's part of the meeting: it waits for the others, and tells them when all have come."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.cluster.addresses import is_loopback, plain
from hpctrain.cluster.meeting.words import MAX_LINE_BYTES, Hello, decode_hello, encode
from hpctrain.errors import MeetingFailed

#: A peer that cannot take one line within this time is gone.
_SEND_LIMIT_S = 2.0
#: Who is under way knocks again within a second (visit.py), and is to learn why there is no meeting.
_LINGER_S = 3.0
#: How soon it is noticed that another thread wants an end.
_TICK_S = 0.2


@dataclass
class _Visitor:
    """Somebody who connected; a rank once it has said so."""

    connection: socket.socket
    address: str
    heard: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None


class Host:
    """Waits until every other rank has come."""

    def __init__(self, listener: socket.socket, me: Hello, deadline: float, where: str) -> None:
        """Listen; see `gather`.

        Args:
            listener: at the port that the others are going to find.
            me: rank 0's introduction of itself.
            deadline: when to give up, on the monotonic clock. A rank that came earlier may give up earlier.
            where: in words, where the others look for this rank.
        """
        self._where = where
        self._me, self._deadline = me, deadline
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._present: dict[int, _Visitor] = {}
        self._notes: dict[str, None] = {}
        self._verdict: str | None = None
        self._failed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def missing(self) -> list[int]:
        """Ranks that are not here, ascending."""
        return [rank for rank in range(1, self._me.world_size) if rank not in self._present]

    def gather(self, remind_at: float, remind: Callable[[str], None]) -> str:
        """Wait for the others, and send them on. Returns the address that they know this host by.

        Args:
            remind_at: when to say what is being waited for, on the monotonic clock.
            remind: takes the sentence.

        Raises:
            MeetingFailed: a rank did not come in time, or came twice. Those that are here have been told.
        """
        try:
            while len(self._present) < self._me.world_size - 1:
                now = time.monotonic()
                if self._verdict is not None:
                    raise MeetingFailed(self._verdict)
                if now >= self._deadline:
                    raise MeetingFailed(self._who_is_missing())
                if now >= remind_at:
                    remind(self._who_is_missing())
                    remind_at = float("inf")
                self._attend(min(self._deadline - now, remind_at - now, _TICK_S))
            return self._send_on()
        except MeetingFailed as error:
            self._tell_all(str(error))
            raise
        finally:
            self._close()

    def give_up(self, verdict: str) -> None:
        """From another thread: let `gather` end with a `MeetingFailed` that says `verdict`."""
        self._verdict = verdict

    def _attend(self, limit_s: float) -> None:
        """See to whoever comes or says something within `limit_s` seconds."""
        for key, _ in self._selector.select(limit_s):
            if key.data is None:
                self._admit()
            else:
                self._hear(key.data)

    def _tell_all(self, verdict: str) -> None:
        """Tell why there is no meeting: those that are here, and in the time that is left who comes next."""
        self._verdict, self._failed = verdict, True
        for visitor in self._present.values():
            _tell(visitor, failed=verdict)
        until = min(self._deadline, time.monotonic() + _LINGER_S)
        with contextlib.suppress(MeetingFailed):
            while self.missing and (left_s := until - time.monotonic()) > 0:
                self._attend(left_s)

    def _admit(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise MeetingFailed(
                    f"{error.strerror}, with {len(self._selector.get_map())} connections; "
                    f"{self._who_is_missing()}"
                ) from error
            return  # They were gone again: accept(2) has the errors of the network, too.
        connection.setblocking(False)
        self._selector.register(
            connection, selectors.EVENT_READ, _Visitor(connection, plain(str(address[0])))
        )

    def _hear(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        visitor.heard += data
        if not data or len(visitor.heard) > MAX_LINE_BYTES:
            self._dismiss(visitor)
        elif visitor.hello is None and b"\n" in visitor.heard:
            self._greet(visitor, decode_hello(bytes(visitor.heard)))

    def _greet(self, visitor: _Visitor, hello: Hello | None) -> None:
        me = self._me
        if hello is None or hello.token != me.token:
            self._note(f"somebody at {visitor.address} connected who belongs to another job or program")
            self._dismiss(visitor)
        elif hello.world_size != me.world_size:
            text = (
                f"rank {hello.rank}, {hello}, counts {hello.world_size} ranks, "
                f"but rank 0, {me}, {me.world_size}"
            )
            self._note(text)
            _tell(visitor, answer=me.answer, refused=text)
            self._dismiss(visitor)
        elif hello.nonce == me.nonce:
            _tell(visitor, answer=me.answer)
            self._dismiss(visitor)
        else:
            self._welcome(visitor, hello)

    def _welcome(self, visitor: _Visitor, hello: Hello) -> None:
        if self._failed:
            visitor.hello = hello
            self._present[hello.rank] = visitor
            _tell(visitor, answer=self._me.answer, failed=str(self._verdict))
            return
        other = self._me if hello.rank == 0 else self._earlier(hello.rank)
        if other is not None and other.nonce != hello.nonce:
            text = (
                f"two processes take themselves for rank {hello.rank} of {hello.world_size}: "
                f"{other} and {hello}. "
                "Start one process a rank; see what each of them finds with `hpctrain env`."
            )
            _tell(visitor, answer=self._me.answer, failed=text)
            raise MeetingFailed(text)
        visitor.hello = hello
        self._present[hello.rank] = visitor
        self._deadline = min(self._deadline, time.monotonic() + hello.left_s)
        _tell(visitor, answer=self._me.answer)

    def _earlier(self, rank: int) -> Hello | None:
        visitor = self._present.get(rank)
        return visitor.hello if visitor else None

    def _dismiss(self, visitor: _Visitor) -> None:
        """Close a connection. A rank that was here is missing again: it may come back."""
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.hello is not None and self._present.get(visitor.hello.rank) is visitor:
            del self._present[visitor.hello.rank]
            self._note(f"rank {visitor.hello.rank}, {visitor.hello}, came and went away")

    def _send_on(self) -> str:
        reached = Counter(visitor.hello.reached for visitor in self._present.values() if visitor.hello)
        elsewhere = {address: count for address, count in reached.items() if not is_loopback(address)}
        common = max(elsewhere or reached, key=lambda address: reached[address])
        for visitor in self._present.values():
            assert visitor.hello is not None
            # One address for all, unless ranks reach this host by different networks.
            own_way = len(elsewhere) > 1 and visitor.hello.reached in elsewhere
            _tell(visitor, address=visitor.hello.reached if own_way else common, host_address=common)
        return common

    def _who_is_missing(self) -> str:
        missing, peers = self.missing, self._me.world_size - 1
        text = (
            f"{peers - len(missing)} of {peers} peers have come to {self._where}; not rank {_listed(missing)}"
        )
        return "; ".join([text, *self._notes])

    def _note(self, text: str) -> None:
        # Once each, and not without end: whoever scans ports may come often.
        if len(self._notes) < 10:
            self._notes[text] = None

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Visitor):
                key.data.connection.close()
        self._selector.close()
        self._listener.setblocking(True)


def _tell(visitor: _Visitor, **words: str) -> None:
    # Who does not take it is found missing, or finds out by itself.
    with contextlib.suppress(OSError):
        visitor.connection.settimeout(_SEND_LIMIT_S)
        visitor.connection.sendall(encode(words))
        visitor.connection.setblocking(False)


def _listed(ranks: list[int]) -> str:
    """`1-3, 7` for a list of ranks; long ones are cut."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ["-".join(map(str, run)) for run in runs]
    return ", ".join(words[:20]) + (f" and {len(words) - 20} more" if len(words) > 20 else "")
