"""Studies for one machine with eight GPUs, as a dry run prints them without any; arms of a run."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmark.agentic.fleet import spec
from benchmark.agentic.fleet.spec import Arm, Rig
from benchmark.agentic.load.sessions import Made, made_sessions
from benchmark.agentic.report.numbers import AGAINST, ratio
from benchmark.agentic.studies import cli
from benchmark.agentic.studies.spec import LoadSpec, Study, find
from unit.documents import pages

STUDIES = ("break_even_8gpu", "throughput_8gpu")
SERVER = re.compile(r"^  (\w+): ports (.+?)(?:; GPUs (.+))?$", re.MULTILINE)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a dry run prints."""
    assert cli.run([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", STUDIES)
def test_servers_of_an_arm_share_no_port_and_no_gpu(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a study file that a researcher starts unseen: each arm uses all eight GPUs, each of
    them once, and SGLang knows each flag."""
    text = dry_run(capsys, name)
    arms = text.split("\n\n")[1:]
    study = spec.load(find(name), Study)
    assert [arm.partition(":")[0] for arm in arms] == list(study.arms)
    for arm in arms:
        found = SERVER.findall(arm)
        assert [role for role, *_ in found].count("router") == 1 and len(found) == 5
        gpus = [int(gpu) for *_, listed in found for gpu in listed.split(", ") if gpu]
        assert gpus == list(range(8))
        ports = re.findall(r"\d+", " ".join(ports for _, ports, _ in found))
        assert len(ports) == len(set(ports)) >= 9
    commands = re.findall(r"^    env .*-m sglang\.launch_server (.*)$", text, re.MULTILINE)
    assert len(commands) == 4 * len(study.arms)
    for command in commands:
        assert pages.flags(command.split()) <= pages.server_flags()
        assert "--device cuda --base-gpu-id" in command and "--tp-size 2" in command
        assert "float32" not in command and "torch_native" not in command
        assert "--sleep-on-idle" not in command


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_sglang_parses_the_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards values that SGLang's parser refuses, such as a number where it wants a name."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = dry_run(capsys, name)
    for command in re.findall(r"^    env .*-m sglang\.launch_server (.*)$", text, re.MULTILINE):
        parsed = parser.parse_args(shlex.split(command))
        assert parsed.tensor_parallel_size == 2 and parsed.base_gpu_id in (0, 2, 4, 6)


@pytest.mark.parametrize("name", STUDIES)
def test_requests_fit_the_pool_and_the_model(name: str) -> None:
    """Guards against a load of which servers refuse requests: half of a pool, and the 40,960 tokens
    of Qwen3-32B."""
    study = spec.load(find(name), Study)
    rig = spec.load(find(name).parent / (study.fleet or ""), spec.FleetFile).rig
    assert rig is not None and study.made is not None
    largest = max(point.made(study.made).largest for point in study.points)
    assert largest <= min(rig.pool_tokens // 2, 40_960)


def test_a_study_is_sent_by_arrival_rate_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "throughput_8gpu", "--rate", "2", "4.5", "--rounds", "3")
    assert "Sessions, 5 arms, 3 rounds: 30 loads, at most about" in text


def smallest_ratio(study: Study, rounds: int) -> float:
    """Return the ratio of two arms that just gets a verdict, if the logarithms of the rounds'
    ratios have a standard deviation of 0.05."""
    arms, loads = len(study.arms), len(study.load.sessions or study.load.speed)
    comparisons = arms - 1 if study.grid else math.comb(arms, 2) * loads
    spread = np.array([-1.0, 1.0] + [0.0] * (rounds - 2))
    logs = 0.05 * spread / spread.std(ddof=1)
    found = ratio(np.exp(logs), 1 - 0.05 / (len(AGAINST) * comparisons))
    return found.high


def test_the_page_says_what_the_rounds_can_show(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards hours of eight GPUs for a page without a verdict."""
    page = (pages.ROOT / "benchmark/agentic/README.md").read_text()
    rows = re.findall(
        r"^\| `(\w+_8gpu)` \| (\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", page, re.M
    )
    assert {name for name, *_ in rows} == {*STUDIES, "replay_8gpu"}
    for name, rounds, limit, *ratios in rows:
        study = spec.load(find(name), Study)
        assert study.rounds == int(rounds)
        numbers = (study.rounds, 5, 8)
        assert [f"{smallest_ratio(study, n):.2f}" for n in numbers] == ratios
        if name in STUDIES:
            assert f"at most about {limit} in all" in dry_run(capsys, name)


def test_a_machine_with_fewer_gpus_is_refused_by_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = tmp_path / "box.yaml"
    fleet.write_text("rig: {gpus: 6, ranks: 2, model: Qwen/Qwen3-32B, pool_tokens: 200000}\n")
    assert cli.run(["break_even_8gpu", "--fleet", str(fleet), "--dry-run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error == (
        "arm aggregated (4 aggregated) needs 8 GPUs, 2 for each server, and `rig` has 6"
    )
    with pytest.raises(ValueError, match="`model` and `ranks` need `gpus`"):
        Rig(ranks=2).check({})


def test_the_servers_of_the_cpu_rig_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the dry run of any study: no server of the CPU rig has a GPU of its own."""
    text = dry_run(capsys, "demo")
    roles = [(role, gpus) for role, _, gpus in SERVER.findall(text)]
    assert roles == [("prefill", ""), ("decode", "")] * 4
    assert "--model-path /tmp" not in text and "model-random" in text


ONE = "only the arm {} would be measured, and compared with nothing"


@pytest.mark.parametrize(
    ("setups", "words", "message"),
    [
        (
            "{radix: {router: http://r}}",
            [],
            ONE.format("radix") + ".*: the fleet has no setup stock",
        ),
        (None, ["--arms", "^radix"], ONE.format("radix") + ".*matches no other. .* --arms radix"),
    ],
)
def test_a_run_of_one_arm_is_refused_by_name(
    setups: str | None,
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards an hour of measuring without a comparison. The arm's exact name asks for it, to be
    compared with another run."""
    if setups:
        (tmp_path / "fleet.yaml").write_text(f"setups: {setups}\n")
        words = ["--fleet", str(tmp_path / "fleet.yaml")]
    assert cli.run(["throughput", "--dry-run", *words]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))
    assert cli.run(["throughput", "--dry-run", *words[-2:], "--arms", "radix"]) == 0


def test_sessions_begin_at_the_rate_of_their_requests() -> None:
    """Guards an arrival rate taken for that of sessions, and arms with other times: 3 requests/s of
    sessions of 4 turns, one request in five cold, begin 1.2 times a second."""
    made = Made(turns=4, cold_share=0.2, first_tokens=4, turn_tokens=2, answer_tokens=2)
    assert made.requests == pytest.approx(2.5)
    times = [due for due, _ in islice(made_sessions(made, range(9), requests_per_s=3), 4000)]
    assert times == sorted(times) and times[0] > 0
    assert len(times) / times[-1] == pytest.approx(3 / 2.5, rel=0.1)
    again = [due for due, _ in islice(made_sessions(made, range(9), requests_per_s=3), 4000)]
    assert again == times
    other = next(made_sessions(msgspec.structs.replace(made, seed=1), range(9), requests_per_s=3))
    assert other[0] != times[0]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"sessions": (1,), "requests_per_s": (1.0,)}, "give one of `sessions`, `speed` and"),
        ({"requests_per_s": (1.0,)}, "`requests_per_s` needs `made`"),
    ],
)
def test_a_rate_that_no_load_has_is_refused(load: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Study("a", "b", {"x": Arm("x")}, LoadSpec(**load))


def test_dropped_sessions_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a study of a tenth of a user's trace, and against an error that names options
    of another command: sessions of a single turn are most of many logs."""
    trace = tmp_path / "trace.jsonl"
    sent = {"input_length": 600, "output_length": 8}
    lines = [
        {"timestamp": 100 * n, **sent, "session_id": f"s{n}", "turn": 0, "hash_ids": [n, n + 99]}
        for n in range(40)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = [
        "linear_lmetric",
        "--trace",
        str(trace),
        "--dry-run",
        "--requests",
        "40",
        "--sessions",
        "4",
    ]
    assert cli.run(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "(the study's `trace: {max_single_turn: 0.3}`)" in error and "--max" not in error
    several = [{**line, "turn": 1, "timestamp": line["timestamp"] + 5000} for line in lines[:20]]
    trace.write_text("\n".join(map(json.dumps, [*lines, *several])))
    assert cli.run(words) == 0
    named = (
        "12 sampled sessions of a single turn were dropped: the study's `trace: {max_single_turn"
    )
    assert named in " ".join(capsys.readouterr().out.split())
    assert cli.run([*words, "32"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the trace has 48 requests" in error and named in error


def test_a_trace_is_not_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against hours of made sessions that pass for a user's own, against a study for traces
    that takes none, and against a window in which no request counts."""
    trace = tmp_path / "trace.jsonl"
    request = {"input_length": 600, "output_length": 8}
    sessions = ({"session_id": f"s{n % 5}", "turn": n // 5 + 1} for n in range(20))
    lines = [
        {"timestamp": 1000 * n, **request, **session, "hash_ids": [n % 5, n + 99]}
        for n, session in enumerate(sessions)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    assert cli.run(["break_even_8gpu", "--trace", str(trace), "--dry-run"]) == 2
    assert "this study makes its sessions" in capsys.readouterr().err
    assert "20 requests" in dry_run(capsys, "replay_8gpu", "--trace", str(trace))
    assert cli.run(["worth", "--trace", str(trace), "--dry-run"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "the trace has 20 requests, and the warm-up of" in error
