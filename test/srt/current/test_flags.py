"""Flags of the group on the command line of SGLang 0.5.23."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.srt.disaggregation.lead import attach
from sglang.srt.disaggregation.lead.flags import VARIABLE_OF
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs, prepare_server_args

TOKENS = "--disaggregation-decode-local-tokens"
RATIO = "--disaggregation-decode-local-prefill-time-ratio"
PREFILL = "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"

pytestmark = pytest.mark.server()


@pytest.fixture(autouse=True)
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded SGLang's plugins and parsed no arguments. No variable is set."""
    for variable in VARIABLE_OF.values():
        monkeypatch.setenv(variable.name, "")
        monkeypatch.delenv(variable.name)
    attach.activate()
    yield
    parse()
    monkeypatch.undo()
    attach.activate()


def given() -> dict[str, str]:
    """Return flag -> value of the variables that are set."""
    names = {flag: variable.name for flag, variable in VARIABLE_OF.items()}
    return {flag: os.environ[name] for flag, name in names.items() if name in os.environ}


def parse(*arguments: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "m", "--device", "cpu", *PREFILL, *arguments])


def test_a_flag_attaches_its_parts() -> None:
    """Guards against a flag without effect in the launcher, which has prefill's bootstrap server,
    or in the processes that inherit its variables."""
    assert attach.attached == ["flags", "identity"] and given() == {}
    args = parse(TOKENS, "128", RATIO, "0.25")
    assert given() == {TOKENS: "128", RATIO: "0.25"}
    assert attach.attached[1:4] == ["settings", "prefill_exit", "local_scheduler"]
    assert args.disaggregation_mode == "prefill"
    parse(RATIO, "0.5")
    assert given() == {RATIO: "0.5"}, "a second engine has flags of its own"
    assert "local_scheduler" not in attach.attached


def test_flags_are_in_a_configuration_file(tmp_path: Path) -> None:
    """Guards against a key that SGLang's reader does not know. The command line comes first."""
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps({TOKENS.removeprefix("--"): 64, RATIO.removeprefix("--"): 0.3}))
    parse("--config", str(file), TOKENS, "32")
    assert given() == {TOKENS: "32", RATIO: "0.3"}


def test_flags_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against flags that no operator finds."""
    with pytest.raises(SystemExit):
        prepare_server_args(["--help"])
    text = capsys.readouterr().out
    assert [flag for flag in VARIABLE_OF if flag not in text] == []


@pytest.mark.parametrize("value", ["-1", "many"])
def test_a_wrong_value_ends_the_launcher(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an error after the weights were loaded."""
    with pytest.raises(SystemExit):
        parse(f"{TOKENS}={value}")
    assert f"argument {TOKENS}: must be an integer from 0" in capsys.readouterr().err
    assert given() == {}


def test_a_refused_combination_names_the_setting(model: str) -> None:
    """Guards against a refusal that only variables reach."""
    args = parse(TOKENS, "128", "--use-ray", "--model-path", model)
    with pytest.raises(ValueError, match="LOCAL_TOKENS=128 cannot be combined with --use-ray"):
        args.resolve_once()


def test_an_engine_takes_them_as_keywords() -> None:
    """Guards against a keyword that SGLang's arguments refuse, and against one that is ignored."""
    args = Engine.server_args_class(model_path="m", disaggregation_decode_local_tokens=16)
    assert isinstance(args, ServerArgs) and given() == {TOKENS: "16"}
    assert "local_scheduler" in attach.attached
    name = "disaggregation_decode_local_prefill_time_ratio"
    with pytest.raises(ValueError, match=f"{name} must be a number above 0 and at most 1, not '2'"):
        Engine.server_args_class(model_path="m", **{name: 2})


def test_parts_are_attached_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a part of a variable that ends up below one of a flag, and against methods
    that are wrapped twice."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    stock = DecodePreallocQueue.pop_preallocated
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_ADMISSION", "remaining")
    attach.activate()
    parse(TOKENS, "128")
    assert attach.attached[3:] == ["local_scheduler", "explain", "admission", "identity"]
    monkeypatch.delenv("SGLANG_DISAGGREGATION_DECODE_ADMISSION")
    monkeypatch.delenv(VARIABLE_OF[TOKENS].name)
    attach.activate()
    assert DecodePreallocQueue.pop_preallocated is stock
