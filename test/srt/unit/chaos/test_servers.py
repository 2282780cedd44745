"""Arms of SGLang 0.5.23: what their servers run."""

from __future__ import annotations

from pathlib import Path

from chaos.servers import LEAD, current_config


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
