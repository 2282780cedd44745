"""Negotiation: decode sends a prefix only to a prefill server that says it understands one.

The prefill's bootstrap server answers ``GET /pd_capabilities``. It is a route of its own because a
stock decode server builds its ``PrefillServerInfo`` from every key of the stock answer, and would
refuse a new one. A stock prefill answers 404, and is then served as today: prefix 0, whole prompt.
"""

from __future__ import annotations

import logging

import msgspec
import requests

from sglang.srt.disaggregation.delta.wire import CONTROL_VERSION, VERSION
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

ROUTE = "/pd_capabilities"
#: Prompts bring the target's KV only.
NO_DRAFTS = "none"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Capabilities(msgspec.Struct, frozen=True):
    """What a prefill server understands.

    ``delta`` and ``control``: the versions of its delta frame and its control messages, or 0.
    ``yields``: whether it ends a request that decode computes itself (``ComputedByDecode``).
    ``incarnation``: names this run of the server; another one at the same address is another
    server, whose ranks know nobody yet. ``speculative``: its ``--speculative-algorithm``, or
    ``NO_DRAFTS``; None where it does not say.
    ``samples``: whether it gives each of parallel samples a room of its own (``unserved.py``).
    """

    delta: int = 0
    control: int = 0
    yields: bool = False
    incarnation: str | None = None
    speculative: str | None = None
    samples: bool = False

    @property
    def takes_delta(self) -> bool:
        """Whether a decode server of this version may send a prefix length."""
        return self.delta == VERSION

    @property
    def takes_control(self) -> bool:
        """Whether it may be sent control messages, and sends them."""
        return self.control == CONTROL_VERSION


OURS = Capabilities(delta=VERSION, control=CONTROL_VERSION, samples=True)
STOCK = Capabilities()


def fetch_capabilities(bootstrap_addr: str) -> Capabilities | None:
    """Query the bootstrap server at ``bootstrap_addr`` (host:port). One attempt.

    Returns None where it could not be queried; the caller tries again later. An answer that cannot
    be understood counts as a stock server: prefix 0 is always right.
    """
    try:
        response = requests.get(
            f"http://{bootstrap_addr}{ROUTE}", timeout=environment.HANDSHAKE_TIMEOUT.read()
        )
    except requests.RequestException as error:
        logger.error(
            "could not query the capabilities of prefill server %s (%s). Its requests wait and "
            "the query is repeated. Check that it is up",
            bootstrap_addr,
            error,
        )
        return None
    if response.status_code == 404:
        logger.warning(
            "prefill server %s does not support decode_prefix_len (stock SGLang?): it will send "
            "whole prompts",
            bootstrap_addr,
        )
        return STOCK
    if response.status_code != 200:
        logger.error(
            "prefill server %s answered %s for %s. Its requests wait and the query is repeated. "
            "Check its log",
            bootstrap_addr,
            response.status_code,
            ROUTE,
        )
        return None
    try:
        capabilities = msgspec.json.decode(response.content, type=Capabilities)
    except _UNREADABLE as error:
        logger.error(
            "prefill server %s sent unreadable capabilities (%s): it will send whole prompts. "
            "Check its version",
            bootstrap_addr,
            error,
        )
        return STOCK
    if not capabilities.takes_delta:
        logger.warning(
            "prefill server %s speaks delta protocol %d, this decode server %d: it will send "
            "whole prompts",
            bootstrap_addr,
            capabilities.delta,
            VERSION,
        )
    return capabilities


def incarnation_in(content: bytes) -> str | None:
    """The incarnation that a body of ``GET /pd_capabilities`` names; None if it cannot be read."""
    try:
        return msgspec.json.decode(content, type=Capabilities).incarnation
    except _UNREADABLE:
        return None
