"""Who is told that decode computes a request itself, and who is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang.srt.disaggregation.delta import capability, wire
from sglang.srt.disaggregation.delta.manager import DeltaManager

ADDRESS = "10.0.0.1:8998"
YIELDS = msgspec.json.encode(msgspec.structs.replace(capability.OURS, yields=True))


def test_the_message_survives_the_wire() -> None:
    message = wire.ComputedByDecode(2**63 - 1)
    assert wire.decode_control(wire.encode_control(message)) == message


@pytest.mark.parametrize(
    ("theirs", "stages", "told"),
    [
        (YIELDS, 1, True),
        (msgspec.json.encode(capability.OURS), 1, False),
        (b'{"delta": 1, "control": 1, "incarnation": "of before local turns"}', 1, False),
        (b"{}", 1, False),
        (YIELDS, 2, False),
        (YIELDS, None, False),
    ],
    ids=["ours", "nobody who answers there", "older", "stock", "pipeline", "unknown topology"],
)
def test_who_is_told(theirs: bytes, stages: int | None, told: bool) -> None:
    """Guards against a prefill server that does not know the message, or whose ranks cannot agree
    on it, and that keeps the request for ever."""
    known = msgspec.json.decode(theirs, type=capability.Capabilities)
    manager: Any = SimpleNamespace(
        servers=SimpleNamespace(capabilities=lambda address: known),
        prefill_info_table={} if stages is None else {ADDRESS: SimpleNamespace(pp_size=stages)},
    )
    assert DeltaManager.peer_yields(manager, ADDRESS) is told
