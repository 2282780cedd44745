"""Text as a trace, with the tokenizer of the shipped model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.agentic.traces import convert
from benchmark.harness.models import TINY_ARITH
from benchmark.traces.read import read


def test_a_prompt_is_what_the_chat_template_makes_of_it(tmp_path: Path) -> None:
    """Guards against lengths without the template's own tokens, and against a later turn whose
    blocks differ from those that a server would hold."""
    conversation = [
        {"from": "human", "value": "What is 12 + 30? " * 60},
        {"from": "gpt", "value": "42"},
        {"from": "human", "value": "And 1 more?"},
        {"from": "gpt", "value": "43"},
    ]
    (tmp_path / "chats").write_text(json.dumps([{"id": "a", "conversations": conversation}]))
    options = ["--format", "sharegpt", "--tokenizer", str(TINY_ARITH)]
    assert convert.convert([str(tmp_path / "chats"), str(tmp_path / "trace"), *options]) == 0
    first, second = read(tmp_path / "trace")
    tokenizer = convert.Tokenizer(str(TINY_ARITH))
    assert first.input_length > len(tokenizer.text(conversation[0]["value"])) > 512
    assert first.output_length == len(tokenizer.text("42"))
    assert first.hash_ids[0] == second.hash_ids[0]


def test_a_tokenizer_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback, and against a download that nobody asked for."""
    (tmp_path / "chats").write_text("[]")
    options = ["--format", "sharegpt", "--tokenizer", str(tmp_path / "none")]
    assert convert.convert([str(tmp_path / "chats"), str(tmp_path / "trace"), *options]) == 2
    assert "none" in capsys.readouterr().err
