"""The rendezvous on rank 0: wait for the other ranks, and notify them when all have arrived."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from hpctrain.authentication import Signed, new_nonce, sign_connection
from hpctrain.cluster.addresses import is_loopback, normalize_address
from hpctrain.cluster.connection_owners import owner_of
from hpctrain.cluster.rendezvous.protocol import (
    MAX_LINE_BYTES,
    Handshake,
    decode_message,
    encode_message,
    nonce_in,
    proof_of_rank_0,
)
from hpctrain.errors import RendezvousError, Unauthenticated
from hpctrain.text import format_ranks

#: A peer that cannot receive one line within this time is considered gone.
_SEND_LIMIT_S = 2.0
#: Ranks that are still connecting retry within a second (client.py), and get the reason of the failure.
_LINGER_S = 3.0
#: Time limit and maximum number of connections that have not introduced themselves. A new one replaces the
#: oldest; a rank that loses its connection this way retries.
_PROOF_LIMIT_S, _MAX_STRANGERS = 5.0, 256
#: Interval in which a request of another thread to stop is noticed.
_TICK_S = 0.2


@dataclass(eq=False)
class _Visitor:
    """A connection; it belongs to a rank after it has proved the key and introduced itself."""

    connection: socket.socket
    address: str
    port: int
    since: float = field(default_factory=time.monotonic)
    heard: bytearray = field(default_factory=bytearray)
    up: Signed | None = None
    down: Signed | None = None
    hello: Handshake | None = None

    def tell(self, **words: str) -> None:
        """Send a message. A rank that does not receive it is reported missing, or reaches its time limit."""
        assert self.down is not None
        with contextlib.suppress(OSError):
            self.connection.settimeout(_SEND_LIMIT_S)
            self.connection.sendall(self.down.seal(words))
            self.connection.setblocking(False)


class RendezvousServer:
    """Waits until every other rank has arrived."""

    def __init__(
        self, listener: socket.socket, me: Handshake, key: bytes, deadline: float, where: str
    ) -> None:
        """Listen; see `gather`.

        Args:
            listener: the socket at the port that the other ranks will find.
            me: rank 0's introduction.
            key: the key that the ranks of this job share.
            deadline: when to give up, on the monotonic clock. Ranks with an earlier deadline advance it.
            where: the address of this rank in words, for messages.
        """
        self._where = where
        self._me, self._key, self._deadline = me, key, deadline
        self._strangers: dict[_Visitor, None] = {}
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
        """Ranks that have not arrived, ascending."""
        return [rank for rank in range(1, self._me.world_size) if rank not in self._present]

    def gather(self, remind_at: float, remind: Callable[[str], None]) -> str:
        """Wait for the other ranks, and notify them. Returns the address at which they reach this host.

        Args:
            remind_at: when to report what is missing, on the monotonic clock.
            remind: receives that report.

        Raises:
            RendezvousError: a rank did not arrive in time, or twice. The connected ranks are notified.
        """
        try:
            while len(self._present) < self._me.world_size - 1:
                now = time.monotonic()
                if self._verdict is not None:
                    raise RendezvousError(self._verdict)
                if now >= self._deadline:
                    raise RendezvousError(self._who_is_missing())
                if now >= remind_at:
                    remind(self._who_is_missing())
                    remind_at = float("inf")
                self._attend(min(self._deadline - now, remind_at - now, _TICK_S))
            return self._send_on()
        except RendezvousError as error:
            self._tell_all(str(error))
            raise
        finally:
            self._close()

    def give_up(self, verdict: str) -> None:
        """Make `gather` raise a `RendezvousError` with message `verdict`. Called from another thread."""
        self._verdict = verdict

    def _attend(self, limit_s: float) -> None:
        """Handle the connections and messages of the next `limit_s` seconds."""
        for key, _ in self._selector.select(limit_s):
            if key.data is None:
                self._admit()
            elif key.data.connection.fileno() >= 0:
                self._hear(key.data)
        now = time.monotonic()
        for visitor in [each for each in self._strangers if now - each.since > _PROOF_LIMIT_S]:
            self._refuse(visitor)

    def _tell_all(self, verdict: str) -> None:
        """Send the reason of the failure to the connected ranks, and to those that connect soon after."""
        self._verdict, self._failed = verdict, True
        for visitor in self._present.values():
            visitor.tell(failed=verdict)
        until = min(self._deadline, time.monotonic() + _LINGER_S)
        with contextlib.suppress(RendezvousError):
            while self.missing and (left_s := until - time.monotonic()) > 0:
                self._attend(left_s)

    def _admit(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if self._strangers:
                    self._refuse(next(iter(self._strangers)))
                    return
                raise RendezvousError(
                    f"{error.strerror}, with {len(self._selector.get_map())} connections; "
                    f"{self._who_is_missing()}"
                ) from error
            return  # The peer is gone again: accept(2) also reports errors of the network.
        connection.setblocking(False)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._refuse(next(iter(self._strangers)))
        visitor = _Visitor(connection, normalize_address(str(address[0])), int(address[1]))
        self._selector.register(connection, selectors.EVENT_READ, visitor)
        self._strangers[visitor] = None

    def _hear(self, visitor: _Visitor) -> None:
        try:
            data = visitor.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        visitor.heard += data
        if visitor.hello is None:
            while b"\n" in visitor.heard and visitor.hello is None and visitor.connection.fileno() >= 0:
                line, _, visitor.heard = visitor.heard.partition(b"\n")
                self._take(visitor, bytes(line))
            if visitor.hello is not None or visitor.connection.fileno() < 0:
                return
        if not data or len(visitor.heard) > MAX_LINE_BYTES:
            self._refuse(visitor)

    def _take(self, visitor: _Visitor, line: bytes) -> None:
        """Handle a line of a connection that has not introduced itself."""
        if visitor.up is None:
            theirs, own = nonce_in(decode_message(line)), new_nonce()
            if theirs is None:
                self._refuse(visitor)
                return
            visitor.up, visitor.down = sign_connection(self._key, own, theirs)
            proof = proof_of_rank_0(self._key, theirs, own)
            with contextlib.suppress(OSError):
                visitor.connection.send(encode_message({"nonce": own.decode(), "proof": proof}))
            return
        try:
            hello = Handshake.read(visitor.up.open(line))
        except Unauthenticated:
            hello = None
        if hello is None:
            self._refuse(visitor)
        else:
            self._greet(visitor, hello)

    def _refuse(self, visitor: _Visitor) -> None:
        """Close a connection. If it did not belong to a rank, note its origin."""
        if visitor in self._strangers:
            owner = owner_of(visitor.port, self._listener.getsockname()[1])
            whose = f" of {owner}" if owner else ""
            self._note(f"a program{whose} at {visitor.address} connected that does not belong to this job")
        self._dismiss(visitor)

    def _greet(self, visitor: _Visitor, hello: Handshake) -> None:
        me = self._me
        del self._strangers[visitor]
        if hello.world_size != me.world_size:
            text = (
                f"world size is {hello.world_size} on rank {hello.rank}, {hello}, "
                f"but {me.world_size} on rank 0, {me}"
            )
            self._note(text)
            visitor.tell(refused=text)
            self._dismiss(visitor)
        elif hello.nonce == me.nonce:
            visitor.tell()
            self._dismiss(visitor)
        else:
            self._welcome(visitor, hello)

    def _welcome(self, visitor: _Visitor, hello: Handshake) -> None:
        if self._failed:
            visitor.hello = hello
            self._present[hello.rank] = visitor
            visitor.tell(failed=str(self._verdict))
            return
        other = self._me if hello.rank == 0 else self._earlier(hello.rank)
        if other is not None and other.nonce != hello.nonce:
            text = (
                f"two processes claim rank {hello.rank} of {hello.world_size}: {other} and {hello}. "
                "Start one process per rank; `hpctrain env` shows the settings of each."
            )
            visitor.tell(failed=text)
            raise RendezvousError(text)
        visitor.hello = hello
        self._present[hello.rank] = visitor
        self._deadline = min(self._deadline, time.monotonic() + hello.left_s)
        visitor.tell()

    def _earlier(self, rank: int) -> Handshake | None:
        visitor = self._present.get(rank)
        return visitor.hello if visitor else None

    def _dismiss(self, visitor: _Visitor) -> None:
        """Close a connection. If it belonged to a rank, that rank is missing again, and may return."""
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
        self._strangers.pop(visitor, None)
        if visitor.hello is not None and self._present.get(visitor.hello.rank) is visitor:
            del self._present[visitor.hello.rank]
            self._note(f"rank {visitor.hello.rank}, {visitor.hello}, connected and disconnected")

    def _send_on(self) -> str:
        reached = Counter(visitor.hello.reached for visitor in self._present.values() if visitor.hello)
        elsewhere = {address: count for address, count in reached.items() if not is_loopback(address)}
        common = max(elsewhere or reached, key=lambda address: reached[address])
        for visitor in self._present.values():
            assert visitor.hello is not None
            # One address for all, unless ranks reach this host through different networks.
            own_way = len(elsewhere) > 1 and visitor.hello.reached in elsewhere
            visitor.tell(address=visitor.hello.reached if own_way else common, host_address=common)
        return common

    def _who_is_missing(self) -> str:
        missing, peers = self.missing, self._me.world_size - 1
        text = (
            f"{peers - len(missing)} of {peers} peers have connected to {self._where}; missing: "
            f"{format_ranks(missing)}"
        )
        return "; ".join([text, *self._notes])

    def _note(self, text: str) -> None:
        # Each text once, up to a limit: a port scan may connect often.
        if len(self._notes) < 10:
            self._notes[text] = None

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Visitor):
                key.data.connection.close()
        self._selector.close()
        self._listener.setblocking(True)
