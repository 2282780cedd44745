"""What a server says of this package: the labels, and the line in its log."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from sglang.srt.patchset import GROUPS, Group, __version__
from sglang.srt.patchset.args import DisaggArgs
from sglang.srt.patchset.identity import identity, line
from sglang.srt.patchset.status import GroupState, GroupStatus, State


def state(**found: GroupStatus) -> State:
    """A process in which the groups ``found`` came so far; the others are attached."""
    groups = tuple(_state_of(group, found) for group in GROUPS)
    return State("1", "1", "", groups)


def _state_of(group: Group, found: dict[str, GroupStatus]) -> GroupState:
    return GroupState(group, found.get(group.name, GroupStatus.ATTACHED), "", ())


def test_a_server_without_flags_names_version_and_groups() -> None:
    """Guards against a rollout that nobody can check from outside: the package may be installed and
    inert, or of another version, and the server runs all the same."""
    about = identity(DisaggArgs, state(nixl_async=GroupStatus.PENDING))
    names = ",".join(group.name for group in GROUPS)
    assert about == {"version": __version__, "groups": names, "protocol": "1", "flags": ""}
    assert line(about) == (
        f"sglang-disagg-patchset {__version__}: feature groups {names}; delta protocol 1; "
        "flags none"
    )


def test_groups_that_are_not_attached_are_left_out() -> None:
    """Guards against a server that says that it has a feature which is switched off, or which does
    not fit."""
    about = identity(DisaggArgs, state(nixl_async=GroupStatus.OFF, buffer_only=GroupStatus.STOCK))
    assert about["groups"] == "base,delta,mooncake_delta,decode_radix"


def test_flags_in_force_are_named_with_their_values() -> None:
    """Guards against two servers of one fleet that differ in a flag and look alike."""
    given = {
        "disaggregation_decode_enable_radix_cache": True,
        "disaggregation_decode_local_tokens": 256,
        "disaggregation_decode_local_tokens_when_lost": 64,
        "disaggregation_decode_local_share": 0.25,
        "hicache_host_memory_mode": "buffer_only",
    }
    defaults = {field.name: field.default for field in dataclasses.fields(DisaggArgs)}
    about = identity(SimpleNamespace(**defaults | given), state())
    assert about["flags"] == (
        "--disaggregation-decode-enable-radix-cache --disaggregation-decode-local-tokens=256 "
        "--disaggregation-decode-fallback-prefill-tokens=64 "
        "--disaggregation-decode-local-prefill-time-ratio=0.25 "
        "--hicache-host-memory-mode=buffer_only"
    )
    assert line(about).endswith(f"; flags {about['flags']}")
