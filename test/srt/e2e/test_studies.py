"""A study of running servers: three URLs and a trace, one command, one page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.agentic.studies import cli, record
from benchmark.harness.fleet import Aggregated, Pair, PairConfig
from benchmark.harness.models import TINY_ARITH
from benchmark.harness.servers import Sizes
from benchmark.traces.generate import generate
from benchmark.traces.record import write

SIZES = Sizes(pool_tokens=8800, page_size=16)
CHAT_BLOCK_TOKENS = 4
"""Words in a block; this model's tokenizer makes 3.5 tokens of a word."""


@pytest.mark.nightly
@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_a_study_of_a_fleet_by_address(endpoint: str, tmp_path: Path) -> None:
    """Guards the newcomer's command against real servers: every request gets an answer of the
    requested length, caches are flushed, and the bytes that prefill sends are counted."""
    trace = tmp_path / "trace.jsonl"
    write(trace, generate(300, 1))
    pair = PairConfig(TINY_ARITH, radix=True, prefill_sizes=SIZES, decode_sizes=SIZES)
    out = tmp_path / "run"
    with (
        Pair(pair, tmp_path / "pair") as pd,
        Aggregated(TINY_ARITH, tmp_path / "one", SIZES) as aggregated,
    ):
        (tmp_path / "fleet.yaml").write_text(
            f"aggregated: [{aggregated.config.url}]\ndecode: [{pd.decode_url}]\n"
            f"prefill: [{{url: {pd.prefill_url}, bootstrap_port: {pd.layout[0].bootstrap_port}}}]\n"
            f"endpoint: {endpoint}\nvocabulary: [16, 300]\n"
            f"block_tokens: {CHAT_BLOCK_TOKENS if endpoint == 'chat' else 16}\n"
            "max_answer_tokens: 20\npool_tokens: 8800\n"
        )
        words = ["worth", "--fleet", str(tmp_path / "fleet.yaml"), "--trace", str(trace)]
        sizes = ("--requests", "12", "--sessions", "3", "--rounds", "3")
        assert cli.run([*words, *sizes, "--out", str(out)]) == 0
        pd.check()
    run = record.load(out)
    assert list(run.titles) == ["aggregated", "pd"] and len(run.cells) == 6
    for cell in run.cells:
        assert cell.outcomes and not cell.unflushed
        assert [o.message for o in cell.outcomes if o.error] == []
        assert all(o.output_tokens == o.wanted_tokens for o in cell.outcomes)
    loads = json.loads((out / "summary.json").read_text())["loads"]
    assert loads["3"]["pd"]["numbers"]["bytes_moved"][0] > 0
    assert "At 3 sessions at once" in (out / "page.md").read_text().split("\n\n")[1]
