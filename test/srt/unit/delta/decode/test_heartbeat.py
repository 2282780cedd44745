"""Heartbeats over scripted probes: alive, silent, gone, restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sglang.srt.disaggregation.delta.decode.heartbeat import Heartbeat, Liveness, Probe

ALIVE, SILENT, GONE = (Probe(each) for each in Liveness)
NEW, NEW_SILENT = Probe(Liveness.ALIVE, "new"), Probe(Liveness.SILENT, "new")
OLD, NAMELESS = {"p:1": "old"}, {"p:1": None}
Lost = list[tuple[str, bool, str]]


def heartbeat(probe: Callable[[str], Probe], failures: int) -> tuple[Heartbeat, Lost]:
    """A heartbeat, and the servers that it gave up."""
    lost: Lost = []
    return Heartbeat(probe, lambda *what: lost.append(what), max_failures=failures), lost


@pytest.mark.parametrize(
    ("failures", "known", "signs", "gone"),
    [
        pytest.param(1, NAMELESS, [SILENT], {0: False}, id="silent once, where that is the bound"),
        pytest.param(3, NAMELESS, [SILENT] * 7, {2: False, 5: False}, id="silent at each third"),
        pytest.param(2, NAMELESS, [SILENT, ALIVE] * 3, {}, id="a sign of life starts anew"),
        pytest.param(2, NAMELESS, [SILENT, GONE], {1: True}, id="nobody runs there"),
        pytest.param(2, NAMELESS, [GONE, SILENT], {1: False}, id="something answers there again"),
        pytest.param(9, OLD, [ALIVE, NEW], {1: True}, id="restarted between two probes"),
        pytest.param(9, OLD, [NEW_SILENT], {0: True}, id="restarted, and the ranks are silent yet"),
        pytest.param(2, OLD, [SILENT, NEW, SILENT], {1: True}, id="restarted: it starts anew"),
        pytest.param(1, OLD, [ALIVE], {}, id="it gave no name this time"),
        pytest.param(1, NAMELESS, [NEW], {}, id="it never gave one"),
        pytest.param(1, {"p:1": "new"}, [NEW], {}, id="the same run"),
    ],
)
def test_when_a_server_is_given_up(
    failures: int, known: dict[str, str | None], signs: list[Probe], gone: dict[int, bool]
) -> None:
    """``gone``: at which probes it is, and whether nobody runs there, which a refused connection
    or another name proves. Guards against a server given up for one lost packet, or never; against
    failures of a whole day that add up; against pages that are held for their whole bound for
    nobody; and against rooms that wait for ranks which do not exist any more."""
    script, found = iter(signs), dict[int, bool]()
    made, lost = heartbeat(lambda address: next(script), failures)
    for number in range(len(signs)):
        made.beat(known)
        if len(lost) > len(found):
            found[number] = lost[-1][1]
    assert found == gone and len(lost) == len(gone)


def test_servers_do_not_disturb_each_other() -> None:
    """Guards against one server, dead or with a strange answer, that takes others with it or hides
    their trouble; and against a count that stays for a server which is forgotten."""
    signs = {"a:1": ALIVE, "b:1": SILENT, "c:1": GONE, "d:1": NEW}

    def probe(address: str) -> Probe:
        if address == "e:1":
            raise UnicodeError("label too long")
        return signs[address]

    made, lost = heartbeat(probe, 2)
    names = dict.fromkeys("abcde", None) | {"d": "old"}
    for _ in range(2):
        made.beat({f"{name}:1": run for name, run in names.items()})
    assert sorted((address, is_gone) for address, is_gone, _ in lost) == [
        ("b:1", False), ("c:1", True), ("d:1", True), ("d:1", True), ("e:1", False),
    ]  # fmt: skip
    lost.clear()
    for known in ({"b:1": None}, {}, {"b:1": None}):
        made.beat(known)
    assert lost == []


def test_a_slow_probe_delays_nobody() -> None:
    """Guards against servers that are probed one after the other, or judged in that order: one
    that hangs for its whole time limit would hide the death of the next."""
    b_was_judged = threading.Event()
    lost: list[str] = []

    def probe(address: str) -> Probe:
        if address == "a:1":
            assert b_was_judged.wait(60), "the other one waited for this"
        return SILENT

    def note(address: str, is_gone: bool, why: str) -> None:
        lost.append(address)
        if address == "b:1":
            b_was_judged.set()

    Heartbeat(probe, note, max_failures=1).beat({"a:1": None, "b:1": None})
    assert lost == ["b:1", "a:1"]
