"""The router's command line, and how the harness starts it."""

import pytest

from benchmark.agentic.fleet.servers import routed
from benchmark.agentic.fleet.spec import Prefill, Setup
from benchmark.agentic.router.cli import main, parser, settings
from benchmark.agentic.router.settings import Settings

PREFILL = Prefill("http://127.0.0.1:1", 8998)
DECODE, COLOCATED = "http://127.0.0.1:2", "http://127.0.0.1:3"


def test_the_harness_starts_what_the_command_line_understands() -> None:
    """Guards against the parser and who starts the router going different ways."""
    extra = ("--decode-policy", "least_tokens", "--alpha", "0.5", "--max-sessions", "7")
    config = routed(Setup((COLOCATED,), (PREFILL,), (DECODE,)), "lmetric", extra)
    assert config.ready_url == f"{config.url}/readiness"
    args = parser().parse_args(config.command[config.command.index("route") + 1 :])
    made = settings(args)
    assert (args.host, args.port) == ("127.0.0.1", config.port)
    assert made.prefills == (("http://127.0.0.1:1", 8998),)
    assert made.decodes == (DECODE,) and made.workers == (COLOCATED,)
    assert (made.policy, made.decode_policy) == ("lmetric", "least_tokens")
    assert (made.knobs.alpha, made.max_sessions) == (0.5, 7)
    split = routed(Setup((), (PREFILL,), (DECODE,)), "linear")
    made = settings(parser().parse_args(split.command[split.command.index("route") + 1 :]))
    assert made.decode_policy == "linear"


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
