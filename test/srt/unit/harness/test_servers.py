"""Command lines and environments, which decide what a comparison compares."""

from benchmark.harness import servers
from benchmark.harness.pair import PairConfig
from benchmark.harness.servers import Sizes

FLAG = "--disaggregation-decode-enable-radix-cache"


def value(command: tuple[str, ...], option: str) -> str:
    return command[command.index(option) + 1]


def test_decode_with_and_without_the_flag_differs_in_the_flag_only() -> None:
    """Guards against an arm that differs in something else than what is measured."""
    sizes = Sizes(pool_tokens=8000, reserved_decode_tokens=64)
    on = servers.decode("m", (1, 2), sizes, radix=True)
    off = servers.decode("m", (1, 2), sizes, radix=False)
    assert set(on.command) - set(off.command) == {FLAG}
    assert on.env == off.env


def test_stock_turns_the_patch_set_off_and_keeps_the_cpu_standin() -> None:
    """Guards against a baseline that is not the stock release, or that cannot start on a CPU."""
    stock = servers.decode("m", (1, 2), stock=True).environment()
    assert (stock["SGLANG_PATCHSET"], stock["SGLANG_CPU_STANDIN"]) == ("0", "1")
    assert servers.decode("m", (1, 2)).environment()["SGLANG_PATCHSET"] == "1"


def test_the_environment_of_a_server_can_be_added_to(monkeypatch) -> None:
    """Guards the way tests pass UCX settings, and start-up time: bytecode stays cached."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = servers.prefill("m", (1, 2, 3), env={"UCX_TLS": "tcp,self"}).environment()
    assert env["UCX_TLS"] == "tcp,self"
    assert "PYTHONDONTWRITEBYTECODE" not in env


def test_sizes_reach_the_command_line() -> None:
    """Guards against pools of other sizes than the table says."""
    sizes = Sizes(4096, page_size=16, chunked_prefill_tokens=256, max_running=8)
    command = servers.prefill("m", (1, 2, 3), sizes).command
    assert value(command, "--max-total-tokens") == "4096"
    assert value(command, "--page-size") == "16"
    assert value(command, "--chunked-prefill-size") == "256"
    assert value(command, "--max-running-requests") == "8"
    assert "--num-reserved-decode-tokens" not in command


def test_a_pair_meets_at_its_bootstrap_port() -> None:
    """Guards against a pair whose halves, or whose router, look for each other elsewhere."""
    prefill, decode, router = PairConfig("m", radix=True, router=True, router_port=81).layout()
    assert value(prefill.command, "--disaggregation-mode") == "prefill"
    assert value(decode.command, "--disaggregation-mode") == "decode"
    assert FLAG in decode.command and FLAG not in prefill.command
    at = router.command.index("--prefill")
    bootstrap = value(prefill.command, "--disaggregation-bootstrap-port")
    assert router.command[at + 1 : at + 3] == (prefill.url, bootstrap)
    assert value(router.command, "--decode") == decode.url
    assert router.port == 81


def test_stock_prefill_alone() -> None:
    """Guards the interoperability arm: only the prefill server runs the stock release."""
    prefill, decode = PairConfig("m", radix=True, stock_prefill=True).layout()
    assert prefill.env["SGLANG_PATCHSET"] == "0"
    assert decode.env["SGLANG_PATCHSET"] == "1"


def test_ranks_reach_only_the_side_that_has_them() -> None:
    """Guards against a comparison with more ranks than was asked for, and against a server of
    several ranks that cannot start on a CPU: each needs cores of its own and no NCCL."""
    plain, ranked = PairConfig("m", prefill_tp=2).layout()[::-1]
    assert value(ranked.command, "--tp-size") == "2" and "--tp-size" not in plain.command
    assert ranked.env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1
    assert ranked.env["SGLANG_NCCL_SO_PATH"] == "none"
    assert "SGLANG_NCCL_SO_PATH" not in plain.env
