"""``python -m benchmark worth-it``: its output and its refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import worth_it
from benchmark.traces.generate import generate
from benchmark.traces.record import write

RATES = ["--network-gb-s", "50", "--prefill-tokens-per-s", "12000"]


def test_a_table_its_answers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "openai/gpt-oss-120b", "--pool-gib", "30", "--prefix", "4000", *RATES]
    out = tmp_path / "folder" / "worth.svg"
    assert worth_it.main([*words, "--decode-step-ms", "20", "--out", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "b = 2 x 36 layers x 8 KV heads x 64 x 2 B" in text and "73,728 B" in text
    assert "18 of 36 layers see 128 tokens" in text and "--disable-hybrid-swa-memory" in text
    assert "Not known from arithmetic" in text
    drawn = out.read_text()
    assert "requests that fit" in drawn and "TTFT without queues, ms" in drawn


def test_a_trace_gives_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "trace.jsonl", generate(200, 1))
    assert worth_it.main(["--pool-gib", "90", "--trace", str(tmp_path / "trace.jsonl")]) == 0
    assert "requests fit instead of" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "nope"], "no model 'nope'"),
        (["--tp", "3"], "--tp 3 and 8 KV heads: one must divide the other"),
        (["--tp", "12"], "--tp 12 and 8 KV heads: one must divide the other"),
        (RATES[:2], "--network-gb-s and --prefill-tokens-per-s together"),
        (["--prefix", "900000"], "raise --pool-gib, or lower --prefix or --turns"),
        (["--trace", "no-such-file"], "no-such-file"),
    ],
)
def test_an_error_names_the_flag(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert worth_it.main(["--pool-gib", "30", *words]) == 2
    assert named in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        ["--pool-gib", "-1"],
        ["--pool-gib", "inf"],
        ["--pool-gib", "30", "--new", "0"],
        ["--pool-gib", "30", "--hit-rate", "1.5"],
        ["--pool-gib", "30", "--pool-tokens", "9"],
        ["--turns", "3"],
    ],
)
def test_a_wrong_value_names_the_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        worth_it.main(words)
    error = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert (words[-2] if len(words) > 2 or words[0] == "--pool-gib" else "--pool-gib") in error
