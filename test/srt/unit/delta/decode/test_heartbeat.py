"""Heartbeats over scripted probes: alive, silent, gone, restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sglang.srt.disaggregation.delta.decode.heartbeat import Heartbeat, Liveness, Probe

ALIVE, SILENT, GONE = (Probe(each) for each in (Liveness.ALIVE, Liveness.SILENT, Liveness.GONE))
Lost = list[tuple[str, bool, str]]


def heartbeat(probe: Callable[[str], Probe], failures: int = 2) -> tuple[Heartbeat, Lost]:
    """A heartbeat, and the servers that it gave up."""
    lost: Lost = []
    return Heartbeat(probe, lambda *what: lost.append(what), max_failures=failures), lost


def scripted(*probes: Probe) -> Callable[[str], Probe]:
    """One probe after another of one server."""
    script = iter(probes)
    return lambda address: next(script)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_silence_is_given_up_after_its_bound(failures: int) -> None:
    """Guards against a server given up for one lost packet, or never; and against one whose
    processes are taken for gone because they hang."""
    made, lost = heartbeat(lambda address: SILENT, failures)
    for count in range(1, failures + 1):
        assert lost == [] and count <= failures
        made.beat({"p:1": None})
    assert [(address, is_gone) for address, is_gone, _ in lost] == [("p:1", False)]


@pytest.mark.parametrize(
    ("signs", "gone"),
    [
        pytest.param((SILENT, ALIVE) * 3, [], id="a sign of life starts the count anew"),
        pytest.param((SILENT, SILENT, SILENT, ALIVE), [False], id="so does being given up"),
        pytest.param((SILENT, GONE), [True], id="nobody runs there"),
        pytest.param((GONE, SILENT), [False], id="now something answers there again"),
    ],
)
def test_when_a_server_is_given_up(signs: tuple[Probe, ...], gone: list[bool]) -> None:
    """``gone``, each time that it is: whether nobody runs there, which a refused connection proves.
    Guards against failures of a whole day that add up, against pages that are held for their whole
    bound for nobody, and against trusting the last probe less than an earlier one."""
    made, lost = heartbeat(scripted(*signs))
    for _ in signs:
        made.beat({"p:1": None})
    assert [is_gone for _, is_gone, _ in lost] == gone


@pytest.mark.parametrize("liveness", [Liveness.ALIVE, Liveness.SILENT])
def test_another_incarnation_is_another_server(liveness: Liveness) -> None:
    """A server that was restarted between two probes answers as ever. Guards against rooms that
    wait for ranks which do not exist any more, also while the new ranks are silent yet."""
    made, lost = heartbeat(lambda address: Probe(liveness, "new"), failures=99)
    made.beat({"p:1": "old"})
    assert [(address, is_gone) for address, is_gone, _ in lost] == [("p:1", True)]
    assert "restarted" in lost[0][2]
    made.beat({"p:1": "new"})
    assert len(lost) == 1


@pytest.mark.parametrize(("known", "seen"), [(None, "new"), ("old", None), (None, None)])
def test_no_name_is_no_restart(known: str | None, seen: str | None) -> None:
    """Guards against a stock server, or one that gave no name this time, being given up."""
    made, lost = heartbeat(lambda address: Probe(Liveness.ALIVE, seen))
    made.beat({"p:1": known})
    assert lost == []


def test_other_servers_are_not_disturbed() -> None:
    """Guards against one dead server that takes others with it, or hides their trouble."""
    signs = {"a:1": ALIVE, "b:1": SILENT, "c:1": GONE, "d:1": Probe(Liveness.ALIVE, "new")}
    made, lost = heartbeat(lambda address: signs[address])
    for _ in range(2):
        made.beat({"a:1": None, "b:1": None, "c:1": None, "d:1": "old"})
    assert sorted((address, is_gone) for address, is_gone, _ in lost) == [
        ("b:1", False),
        ("c:1", True),
        ("d:1", True),
        ("d:1", True),
    ]


def test_a_probe_that_raises_counts_as_silence() -> None:
    """Guards against one server's strange answer that ends the probes of all others."""

    def probe(address: str) -> Probe:
        if address == "a:1":
            raise UnicodeError("label too long")
        return SILENT

    made, lost = heartbeat(probe, failures=1)
    made.beat({"a:1": None, "b:1": None})
    assert sorted(address for address, _, _ in lost) == ["a:1", "b:1"]


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


def test_a_server_that_is_not_known_any_more_is_forgotten() -> None:
    """Guards against a count that stays and grows a table, or that a later server inherits."""
    made, lost = heartbeat(scripted(SILENT, SILENT))
    made.beat({"p:1": None})
    made.beat({})
    made.beat({"p:1": None})
    assert lost == [] and list(made._misses) == ["p:1"]
