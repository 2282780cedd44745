"""What a server says of this package: the labels, and the line in its log."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from sglang.srt.patchset import GROUPS, __version__
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.start_check import identity, line
from sglang.srt.patchset.status import GroupState, GroupStatus, State

GIVEN = {
    "disaggregation_decode_enable_radix_cache": True,
    "disaggregation_decode_local_tokens": 256,
    "disaggregation_decode_fallback_prefill_tokens": 64,
    "disaggregation_decode_local_prefill_time_ratio": 0.25,
    "hicache_host_memory_mode": "buffer_only",
}
FLAGS = (
    "--disaggregation-decode-enable-radix-cache --disaggregation-decode-local-tokens=256 "
    "--disaggregation-decode-fallback-prefill-tokens=64 "
    "--disaggregation-decode-local-prefill-time-ratio=0.25 "
    "--hicache-host-memory-mode=buffer_only"
)
LEFT_OUT = {
    "nixl_async": GroupStatus.OFF,
    "buffer_only": GroupStatus.STOCK,
    "decode_offload": GroupStatus.STOCK,
}


@pytest.mark.parametrize(
    ("given", "found", "groups", "flags"),
    [
        ({}, {}, ",".join(group.name for group in GROUPS), ""),
        # Their targets are not imported yet.
        ({}, dict.fromkeys(LEFT_OUT, GroupStatus.PENDING), ",".join(g.name for g in GROUPS), ""),
        (GIVEN, LEFT_OUT, "base,delta,mooncake_delta,decode_radix", FLAGS),
    ],
    ids=["no flags", "pending", "flags, and groups that are not attached"],
)
def test_what_a_server_says(
    given: dict[str, object], found: dict[str, GroupStatus], groups: str, flags: str
) -> None:
    """Guards against a rollout that nobody can check from outside: the package may be installed and
    inert, of another version, or without a group; or two servers of one fleet differ in a flag and
    look alike."""
    defaults = {field.name: field.default for field in dataclasses.fields(DisaggArgs)}
    states = [
        GroupState(group, found.get(group.name, GroupStatus.ATTACHED), "", ()) for group in GROUPS
    ]
    about = identity(SimpleNamespace(**defaults | given), State("1", "1", "", tuple(states)))
    assert about == {"version": __version__, "groups": groups, "protocol": "1", "flags": flags}
    assert line(about) == (
        f"sglang-disagg-patchset {__version__}: feature groups {groups}; delta protocol 1; "
        f"flags {flags or 'none'}"
    )
