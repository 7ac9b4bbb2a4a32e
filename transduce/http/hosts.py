"""The names of this server: guards against pages of other sites and DNS rebinding."""

from __future__ import annotations

import re
import socket
from collections.abc import Collection
from ipaddress import ip_address

HOST = re.compile(r"(\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[a-z0-9_.-]+))(:[0-9]{1,5})?", re.I)


def foreign_request(
    asked: str, origin: str | None, host: str, others: Collection[str] = ()
) -> str | None:
    """Return why a request from another site is refused; None if it is not.

    `asked` is the Host header, which must name this server, and `origin` the Origin header, which
    must be this server's own if there is one.
    """
    if not names_this_server(asked, host, others):
        return f"this server is not {asked!r}; use its own address"
    own = {f"http://{asked}".lower(), f"https://{asked}".lower()}
    if origin is not None and origin.lower() not in own:
        return f"pages of {origin!r} may not use this server; open its own page"
    return None


def names_this_server(asked: str, host: str, others: Collection[str] = ()) -> bool:
    """Return whether a Host header names this server, which guards against DNS rebinding.

    The header is a name or an address and perhaps a port. The port may be any, because tunnels and
    containers change it. A server that listens on all addresses has the name of the machine and any
    IP address. `others` are further names, in lower case, such as that of a proxy before it.
    """
    found = HOST.fullmatch(asked)
    if found is None:
        return False
    if found["address"] is not None:
        name = found["address"].lower()
        if ":" not in name:
            return False
    else:
        name = found["name"].lower()
    if name in ("localhost", "127.0.0.1", "::1", host.lower(), *others):
        return True
    return host in ("0.0.0.0", "::") and (name == socket.gethostname().lower() or _is_address(name))


def _is_address(name: str) -> bool:
    """Return whether a name is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
