"""Which network addresses are everybody's: what a user names must not make the server call its own network."""

from __future__ import annotations

import ipaddress

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HERE = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def is_public(address: str) -> bool:
    """False for loopback, private, link-local, shared, reserved and multicast addresses, also inside an IPv6 one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast


def is_known_private(host: str) -> bool:
    """True for a host that is certainly not public: an address of that kind, or a name of this machine.

    Other names are known when they are resolved.
    """
    host = host.strip("[]").rstrip(".").lower()
    if host in _HERE or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        return not is_public(host)
    except ValueError:
        return False
