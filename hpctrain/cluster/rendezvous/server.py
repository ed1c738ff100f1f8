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
from hpctrain.cluster.connection_owners import connection_owner
from hpctrain.cluster.rendezvous.protocol import (
    MAX_LINE_BYTES,
    Handshake,
    decode_message,
    encode_message,
    proof_of_rank_0,
    read_nonce,
)
from hpctrain.errors import RendezvousError, Unauthenticated
from hpctrain.text import format_ranks

#: A peer that cannot receive a line within this time is considered lost.
_SEND_LIMIT_S = 2.0
#: Ranks that are still connecting retry within a second (client.py), and receive the reason of the failure.
_LINGER_S = 3.0
#: Time limit and maximum number of connections without an introduction. A new connection replaces the oldest;
#: a rank whose connection is dropped retries.
_PROOF_LIMIT_S, _MAX_UNIDENTIFIED = 5.0, 256
#: Interval for detecting a stop request of another thread.
_TICK_S = 0.2


@dataclass(eq=False)
class _Peer:
    """A connection, which belongs to a rank after authentication and introduction."""

    connection: socket.socket
    address: str
    port: int
    since: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    up: Signed | None = None
    down: Signed | None = None
    handshake: Handshake | None = None

    def send(self, **words: str) -> None:
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
            listener: the socket on the port that the other ranks will find.
            me: rank 0's introduction.
            key: the key that the ranks of this job share.
            deadline: time limit on the monotonic clock. Ranks with an earlier deadline advance it.
            where: the address of this rank in words, for messages.
        """
        self._where = where
        self._me, self._key, self._deadline = me, key, deadline
        self._unidentified: dict[_Peer, None] = {}
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}
        self._notes: dict[str, None] = {}
        self._failure: str | None = None
        self._failed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    @property
    def missing(self) -> list[int]:
        """Ranks that have not arrived, ascending."""
        return [rank for rank in range(1, self._me.world_size) if rank not in self._peers]

    def gather(self, remind_at: float, remind: Callable[[str], None]) -> str:
        """Wait for the other ranks, and notify them. Returns the address of this host for the other ranks.

        Args:
            remind_at: time of a report on missing ranks, on the monotonic clock.
            remind: receives the report.

        Raises:
            RendezvousError: a rank did not arrive in time, or twice. The connected ranks are notified.
        """
        try:
            while len(self._peers) < self._me.world_size - 1:
                now = time.monotonic()
                if self._failure is not None:
                    raise RendezvousError(self._failure)
                if now >= self._deadline:
                    raise RendezvousError(self._describe_missing())
                if now >= remind_at:
                    remind(self._describe_missing())
                    remind_at = float("inf")
                self._poll(min(self._deadline - now, remind_at - now, _TICK_S))
            return self._release_peers()
        except RendezvousError as error:
            self._broadcast_failure(str(error))
            raise
        finally:
            self._close()

    def abort(self, message: str) -> None:
        """Make `gather` raise a `RendezvousError` with message `message`. Called from another thread."""
        self._failure = message

    def _poll(self, limit_s: float) -> None:
        """Handle the connections and messages of the next `limit_s` seconds."""
        for key, _ in self._selector.select(limit_s):
            if key.data is None:
                self._accept()
            elif key.data.connection.fileno() >= 0:
                self._receive(key.data)
        now = time.monotonic()
        for peer in [each for each in self._unidentified if now - each.since > _PROOF_LIMIT_S]:
            self._refuse(peer)

    def _broadcast_failure(self, verdict: str) -> None:
        """Send the reason of the failure to the connected ranks, and to ranks that connect soon after."""
        self._failure, self._failed = verdict, True
        for peer in self._peers.values():
            peer.send(failed=verdict)
        until = min(self._deadline, time.monotonic() + _LINGER_S)
        with contextlib.suppress(RendezvousError):
            while self.missing and (left_s := until - time.monotonic()) > 0:
                self._poll(left_s)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if self._unidentified:
                    self._refuse(next(iter(self._unidentified)))
                    return
                raise RendezvousError(
                    f"cannot accept another connection ({error.strerror}); {self._describe_missing()}"
                ) from error
            return  # The peer has disconnected: accept(2) also reports network errors.
        connection.setblocking(False)
        if len(self._unidentified) >= _MAX_UNIDENTIFIED:
            self._refuse(next(iter(self._unidentified)))
        peer = _Peer(connection, normalize_address(str(address[0])), int(address[1]))
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._unidentified[peer] = None

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.received += data
        if peer.handshake is None:
            while b"\n" in peer.received and peer.handshake is None and peer.connection.fileno() >= 0:
                line, _, peer.received = peer.received.partition(b"\n")
                self._handle_line(peer, bytes(line))
            if peer.handshake is not None or peer.connection.fileno() < 0:
                return
        if not data or len(peer.received) > MAX_LINE_BYTES:
            self._refuse(peer)

    def _handle_line(self, peer: _Peer, line: bytes) -> None:
        """Handle a line of a connection that has not introduced itself."""
        if peer.up is None:
            theirs, own = read_nonce(decode_message(line)), new_nonce()
            if theirs is None:
                self._refuse(peer)
                return
            peer.up, peer.down = sign_connection(self._key, own, theirs)
            proof = proof_of_rank_0(self._key, theirs, own)
            with contextlib.suppress(OSError):
                peer.connection.send(encode_message({"nonce": own.decode(), "proof": proof}))
            return
        try:
            handshake = Handshake.parse(peer.up.open(line))
        except Unauthenticated:
            handshake = None
        if handshake is None:
            self._refuse(peer)
        else:
            self._handshake(peer, handshake)

    def _refuse(self, peer: _Peer) -> None:
        """Close a connection. If it did not belong to a rank, record its origin."""
        if peer in self._unidentified:
            owner = connection_owner(peer.port, self._listener.getsockname()[1])
            whose = f" run by {owner}" if owner else ""
            self._note(f"a program{whose} on {peer.address} connected, but does not belong to this job")
        self._disconnect(peer)

    def _handshake(self, peer: _Peer, handshake: Handshake) -> None:
        me = self._me
        del self._unidentified[peer]
        if handshake.world_size != me.world_size:
            text = (
                f"the world size is {handshake.world_size} on rank {handshake.rank} ({handshake}), "
                f"but {me.world_size} on rank 0 ({me})"
            )
            self._note(text)
            peer.send(refused=text)
            self._disconnect(peer)
        elif handshake.nonce == me.nonce:
            peer.send()
            self._disconnect(peer)
        else:
            self._register(peer, handshake)

    def _register(self, peer: _Peer, handshake: Handshake) -> None:
        if self._failed:
            peer.handshake = handshake
            self._peers[handshake.rank] = peer
            peer.send(failed=str(self._failure))
            return
        other = self._me if handshake.rank == 0 else self._earlier_handshake(handshake.rank)
        if other is not None and other.nonce != handshake.nonce:
            text = (
                f"two processes claim rank {handshake.rank} of {handshake.world_size}: {other} and "
                f"{handshake}. Start one process per rank. To show the settings of each process, run "
                "`hpctrain env` with the same launcher (for example, `srun hpctrain env`)."
            )
            peer.send(failed=text)
            raise RendezvousError(text)
        peer.handshake = handshake
        self._peers[handshake.rank] = peer
        self._deadline = min(self._deadline, time.monotonic() + handshake.left_s)
        peer.send()

    def _earlier_handshake(self, rank: int) -> Handshake | None:
        peer = self._peers.get(rank)
        return peer.handshake if peer else None

    def _disconnect(self, peer: _Peer) -> None:
        """Close a connection. If it belonged to a rank, that rank is missing again and may reconnect."""
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._unidentified.pop(peer, None)
        if peer.handshake is not None and self._peers.get(peer.handshake.rank) is peer:
            del self._peers[peer.handshake.rank]
            self._note(f"rank {peer.handshake.rank} ({peer.handshake}) connected, but then disconnected")

    def _release_peers(self) -> str:
        reached = Counter(peer.handshake.reached for peer in self._peers.values() if peer.handshake)
        elsewhere = {address: count for address, count in reached.items() if not is_loopback(address)}
        common = max(elsewhere or reached, key=lambda address: reached[address])
        for peer in self._peers.values():
            assert peer.handshake is not None
            # A single address for all, unless ranks connect through different networks.
            own_way = len(elsewhere) > 1 and peer.handshake.reached in elsewhere
            peer.send(address=peer.handshake.reached if own_way else common, host_address=common)
        return common

    def _describe_missing(self) -> str:
        missing, peers = self.missing, self._me.world_size - 1
        text = (
            f"{peers - len(missing)} of {peers} peers have connected to {self._where}; missing: "
            f"{format_ranks(missing)}"
        )
        return "; ".join([text, *self._notes])

    def _note(self, text: str) -> None:
        # Each message once, up to a limit: a port scan may connect often.
        if len(self._notes) < 10:
            self._notes[text] = None

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                key.data.connection.close()
        self._selector.close()
        self._listener.setblocking(True)
