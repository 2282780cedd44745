"""The router's command line, and how the harness starts it."""

import pytest

from benchmark.agentic.router import launch
from benchmark.agentic.router.cli import main, parser, settings
from benchmark.agentic.router.settings import Settings

PREFILL = ("http://127.0.0.1:1", 8998)
DECODE, COLOCATED = "http://127.0.0.1:2", "http://127.0.0.1:3"


def test_the_harness_starts_what_the_command_line_understands() -> None:
    """Guards launch.config against the parser going another way."""
    extra = ("--decode-policy", "least_tokens", "--alpha", "0.5", "--max-sessions", "7")
    config = launch.config(9, [PREFILL], [DECODE], [COLOCATED], extra_args=extra)
    assert config.ready_url == "http://127.0.0.1:9/readiness"
    args = parser().parse_args(config.command[config.command.index("route") + 1 :])
    made = settings(args)
    assert (args.host, args.port) == ("127.0.0.1", 9)
    assert made.prefills == (("http://127.0.0.1:1", 8998),)
    assert made.decodes == ("http://127.0.0.1:2",)
    assert made.workers == ("http://127.0.0.1:3",)
    assert (made.decode_policy, made.knobs.alpha, made.max_sessions) == ("least_tokens", 0.5, 7)


def test_flags_default_to_the_settings() -> None:
    """Guards the two sets of defaults against drifting apart."""
    assert settings(parser().parse_args(["--worker", "http://a"])) == Settings(("http://a",))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "--worker"),
        (["--decode", "http://d"], "--prefill"),
        (["--worker", "http://a", "--worker", "http://a"], "twice"),
    ],
)
def test_workers_that_make_no_sense_are_refused(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a router that could never route."""
    with pytest.raises(SystemExit):
        main(arguments)
    assert names in capsys.readouterr().err
