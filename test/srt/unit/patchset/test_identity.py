"""A server's statements about this package: the labels, and the line in its log."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from sglang.srt.patchset import GROUPS, __version__
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.start_check import identity, line
from sglang.srt.patchset.status import GroupState, GroupStatus, PatchsetState

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
    ("flags_given", "changed", "groups", "flags"),
    [
        ({}, {}, ",".join(group.name for group in GROUPS), ""),
        # Targets that are not imported yet.
        ({}, dict.fromkeys(LEFT_OUT, GroupStatus.PENDING), ",".join(g.name for g in GROUPS), ""),
        (GIVEN, LEFT_OUT, "base,delta,mooncake_delta,decode_radix", FLAGS),
    ],
    ids=["no flags", "pending", "flags and detached groups"],
)
def test_identity_of_a_server(
    flags_given: dict[str, object], changed: dict[str, GroupStatus], groups: str, flags: str
) -> None:
    """Guards against a rollout that cannot be checked from outside: the package may be installed
    but inert, of another version, or without a group; or two servers of one fleet differ in a flag
    and look alike."""
    defaults = {field.name: field.default for field in dataclasses.fields(DisaggArgs)}
    states = [
        GroupState(group, changed.get(group.name, GroupStatus.ATTACHED), "", ()) for group in GROUPS
    ]
    labels = identity(
        SimpleNamespace(**defaults | flags_given), PatchsetState("1", "1", "", tuple(states))
    )
    assert labels == {"version": __version__, "groups": groups, "protocol": "1", "flags": flags}
    assert line(labels) == (
        f"sglang-disagg-patchset {__version__}: feature groups {groups}; delta protocol 1; "
        f"flags {flags or 'none'}"
    )
