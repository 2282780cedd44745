"""How long each side waits for the other. Read where a server starts, refused there when wrong."""

from __future__ import annotations

from sglang.srt.disaggregation.delta.env import env_seconds


def quarantine_seconds() -> float:
    """How long decode holds the pages of a room that ended early without a sign from prefill.

    Prefill reads the same variable: a rank that was suspended for half of it posts nothing more
    for the rooms that it knew before, because decode may have given their pages to others.
    """
    return env_seconds("SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT", 60.0)


def transfer_seconds() -> float:
    """How long a chunk may take on prefill, from its queue to its end."""
    return env_seconds("SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT", 120.0)


def claim_seconds() -> float:
    """How long an announcement waits on prefill for its request, which a router sends at the same
    time. If it never came there, decode would hold the pages for its whole transfer deadline."""
    return env_seconds("SGLANG_DISAGGREGATION_CLAIM_TIMEOUT", 30.0)


def peer_seconds() -> float:
    """After how long without a sign prefill forgets a decode rank that used to give some."""
    return env_seconds("SGLANG_DISAGGREGATION_PEER_TIMEOUT", 120.0)


def handshake_seconds() -> float:
    """How long one HTTP request of decode to a prefill's bootstrap server may take."""
    return env_seconds("SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT", 5.0)


def check() -> None:
    """Read them all.

    Raises:
        ValueError: one is set to something that is no duration; the message names it.
    """
    quarantine_seconds()
    transfer_seconds()
    claim_seconds()
    peer_seconds()
    handshake_seconds()
