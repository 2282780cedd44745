"""TCP ports that are never shared by two runs on one machine.

A port that the kernel reports as free may be taken before the server binds it. Two measures make
this unlikely: ports are below the kernel's own range for outgoing connections, and each one is held
by a lock file for as long as this process lives.
"""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

# Linux uses 32768-60999 for outgoing connections (NIXL and ZMQ sockets among them).
PORT_RANGE = range(20000, 32000)

_LOCK_FOLDER = Path(tempfile.gettempdir()) / "sglang-disagg-ports"
_held: dict[int, IO[str]] = {}


def allocate_ports(count: int, *, in_a_row: bool = False) -> list[int]:
    """Return ``count`` different free ports, reserved until this process ends.

    The reservation is seen only by processes that use this function; other programs can take a port
    before the server starts, which the server then reports.

    ``in_a_row``: for a server that is given one port and counts up from it, as SGLang does from
    ``--dist-init-addr`` with data-parallel attention.
    """
    ports: list[int] = []
    length = count if in_a_row else 1
    firsts = range(PORT_RANGE.start, PORT_RANGE.stop - length + 1)
    for first in random.SystemRandom().sample(firsts, len(firsts)):
        row = range(first, first + length)
        reserved = [port for port in row if port not in _held and _reserve(port)]
        if len(reserved) == length:
            ports += reserved
            if len(ports) == count:
                return ports
        else:
            for port in reserved:
                _held.pop(port).close()
    raise RuntimeError(f"no {count} free ports in {PORT_RANGE.start}-{PORT_RANGE.stop - 1}")


def is_free(port: int) -> bool:
    """Return True if a server could listen on the port at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    _LOCK_FOLDER.mkdir(exist_ok=True)
    _LOCK_FOLDER.chmod(0o777)
    lock = open(_LOCK_FOLDER / str(port), "w")  # noqa: SIM115 - held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return False
    if not is_free(port):
        lock.close()
        return False
    _held[port] = lock
    return True
