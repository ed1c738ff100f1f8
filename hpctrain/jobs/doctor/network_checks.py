"""Checks of this machine's name and interfaces, which ranks on several machines use to connect."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping

from hpctrain.cluster.addresses import interfaces, is_loopback, resolve_host
from hpctrain.jobs.doctor.finding import Finding

_TOPIC = "Network"
_INFINIBAND = "/sys/class/infiniband"


def check_network(environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on the network of this machine."""
    return [*_name(), *_interfaces(environ)]


def _name() -> Iterator[Finding]:
    host = socket.gethostname()
    try:
        addresses = resolve_host(host)
    except OSError as error:
        yield Finding(
            _TOPIC,
            "host name",
            f"{host} does not resolve: {error}",
            "note",
            "Ranks use the addresses in Slurm's configuration instead. Ask the administrator to add the name "
            "to /etc/hosts or DNS.",
        )
        return
    if all(map(is_loopback, addresses)):
        yield Finding(
            _TOPIC,
            "host name",
            f"{host} resolves to {', '.join(addresses)} on this machine",
            "note",
            "Ranks on other machines could not connect to gloo at this address, so runs set "
            "GLOO_SOCKET_IFNAME to the right interface.",
        )
    else:
        yield Finding(_TOPIC, "host name", f"{host} resolves to {', '.join(addresses)}")


def _interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    listed: dict[str, list[str]] = {}
    for name, address in interfaces():
        if not is_loopback(address.partition("%")[0]) and not address.startswith("fe80:"):
            listed.setdefault(name, []).append(address)
    words = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in listed.items())
    if words:
        yield Finding(_TOPIC, "interfaces", words)
    else:
        yield Finding(_TOPIC, "interfaces", "loopback only", "note", "Runs on several nodes will not work.")
    try:
        cards = sorted(os.listdir(_INFINIBAND))
    except OSError:
        cards = []
    if cards:
        yield Finding(_TOPIC, "InfiniBand", ", ".join(cards))
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"):
        if value := environ.get(variable):
            yield Finding(_TOPIC, variable, f"{value} (set in your environment and also used by runs)")
