"""Why rooms fail: the values of the ``reason`` label of ``sglang:kv_transfer_failed_total``."""

from __future__ import annotations

import enum


class Reason(str, enum.Enum):
    """A failed room has one; the text that goes with it has the details."""

    #: The client went away, here or on the other side.
    ABORTED = "aborted"
    #: A deadline passed; the text names the environment variable.
    TIMEOUT = "timeout"
    #: The peer gave no sign of life, or came back as another process.
    PEER_LOST = "peer_lost"
    #: The other side reported a failure.
    PEER_FAILED = "peer_failed"
    #: What decode announced does not fit.
    MISMATCH = "mismatch"
    #: The transport refused or broke a transfer.
    TRANSPORT = "transport"
    #: Decode and prefill could not be connected.
    HANDSHAKE = "handshake"
    #: A bug here, or a transfer worker that does not go on.
    INTERNAL = "internal"
