"""The address that the server listens on."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048
OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)  # what another port may help against


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; port 0 takes any that is free.

    Raises:
        ValueError: the address cannot be used.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must be from 0 (any that is free) to 65535")
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(
            f"the address {host}:{port} cannot be used: {error}; choose another with --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        elsewhere = "--port" if error.errno in OF_THE_PORT else "--host"
        raise ValueError(
            f"the address {host}:{port} cannot be used: {error}; choose another with {elsewhere}"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
