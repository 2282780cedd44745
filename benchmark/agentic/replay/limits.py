"""Open files: every stream is a socket, and nothing here bounds the streams."""

from __future__ import annotations

import resource

OTHERS = 64
"""Files that this process needs besides its streams."""


class TooFewFiles(OSError):
    """The operating system's limit is below what the replay asks for."""


def raise_open_files(streams: int, sockets: int = 1) -> int:
    """Raise the soft limit to the hard one; returns it.

    ``streams``: as many may be open at once. ``sockets``: of each stream, 2 for a pair.

    Raises:
        TooFewFiles: the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = streams * sockets + OTHERS
    if hard != resource.RLIM_INFINITY and hard < need:
        raise TooFewFiles(
            f"{streams} streams need {need} open files, and the hard limit is {hard}: raise it "
            "(ulimit -Hn, LimitNOFILE=), or send fewer sessions at once"
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
