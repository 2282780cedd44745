"""What must hold of the servers of an arm, seen on logs and metrics that are written here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import store
from chaos.servers import LEAD, Incarnation, Servers, chaos_config, current_config


def test_a_server_that_never_checks_itself_is_a_problem(tmp_path: Path) -> None:
    """Guards against a run that calls servers balanced because they did not look, and against one
    that died and passes for one of those that a run kills."""
    servers = Servers(chaos_config(tmp_path, tmp_path, "nixl", 16), tmp_path)
    for role in ("prefill", "decode"):
        (log := tmp_path / role).write_text("idle and balanced: all invariants hold\n")
        process: Any = SimpleNamespace(log=log, alive=role == "prefill")
        servers.incarnations.append(Incarnation(role, 1, process))
    since = servers.log_sizes()
    with pytest.raises(TimeoutError, match="decode did not check its invariants"):
        servers.wait_balanced(since, timeout_s=0.05)
    for one in servers.incarnations:
        with one.process.log.open("a") as log:
            log.write("idle and balanced: all invariants hold\n")
    servers.wait_balanced(since, timeout_s=5)
    assert servers.dead() == [servers.current("decode")]
    servers.current("decode").killed_at = 7
    assert servers.dead() == []


def test_a_stage_that_does_not_empty_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a stage that is empty for a moment only, or never, and passes."""
    monkeypatch.setattr(store, "METRICS_S", 0.3)
    held = {"write_pages": 0.0, "read_pages": 3.0, "pending_intents": 0.0}
    monkeypatch.setattr(store, "stage", lambda url: held)
    with pytest.raises(TimeoutError, match="{'read_pages': 3}"):
        store.wait_drained("http://x", timeout_s=0.1)
    seen = iter([0.0, 2.0, 0.0])
    monkeypatch.setattr(store, "stage", lambda url: {**held, "read_pages": next(seen, 0.0)})
    store.wait_drained("http://x", timeout_s=5)
    assert next(seen, None) is None


def test_the_arms_of_the_later_release_differ_in_the_lead_only(tmp_path: Path) -> None:
    """Guards against a comparison of two stock pairs, or of two different ones."""
    for lead, stock in zip(
        current_config(tmp_path, 16, stock=False).layout(),
        current_config(tmp_path, 16, stock=True).layout(),
        strict=True,
    ):
        assert lead.env == {**stock.env, "SGLANG_PATCHSET": "1", **LEAD}
        assert stock.env["SGLANG_PATCHSET"] == "0" and not LEAD.keys() & stock.env.keys()
        # Ports are new for each pair.
        assert [a for a in stock.command if not a.isdecimal()] == [
            a for a in lead.command if not a.isdecimal()
        ]
