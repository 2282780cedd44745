"""Load servers by address with AIPerf, and convert its export into our outcomes.

AIPerf (https://github.com/ai-dynamo/aiperf; tested with 0.13.0) has its own trace formats, sessions
and OpenAI client. It runs from a separate environment, so that it pins none of our dependencies:
``python -m venv aiperf && aiperf/bin/pip install aiperf``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.prepare import PromptSource, body
from benchmark.agentic.load.run import Counting, Window
from benchmark.agentic.load.sessions import Turn
from benchmark.harness.command import RunFailed

EXPORT = "profile_export.jsonl"
MOONCAKE = "mooncake_trace"


class Program(msgspec.Struct, frozen=True):
    """The AIPerf program, and a trace for it."""

    path: Path
    file: Path | None = None
    """A trace that AIPerf reads itself; None: the study's, sampled and scaled."""
    format: str = MOONCAKE
    """Format of the file, as ``--custom-dataset-type``."""


def command(
    program: Program,
    url: str,
    out: Path,
    *,
    model: str,
    endpoint: str,
    block_tokens: int,
    requests: int | None,
    sessions: int | None,
    timeout_s: float,
    tokenizer: str = "builtin",
    headers: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the command of a trace's profile. ``sessions``: concurrent ones; None: at the trace's
    times. ``requests``: number to send; None: all."""
    how = ["--fixed-schedule"]
    if sessions is not None:
        how = ["--no-fixed-schedule", "--concurrency", str(sessions)]
    if requests is not None:
        how += ["--request-count", str(requests)]
    words = [str(program.path), "profile", "--model-names", model, "--url", url]
    words += ["--endpoint-type", endpoint, "--streaming", "--use-server-token-count"]
    words += ["--custom-dataset-type", program.format, "--input-file", str(program.file)]
    words += ["--prompt-input-tokens-block-size", str(block_tokens), "--tokenizer", tokenizer]
    words += [*how, "--extra-inputs", "ignore_eos:true"]
    words += ["--request-timeout-seconds", f"{timeout_s:g}", "--ui", "none"]
    words += ["--output-artifact-dir", str(out)]
    return words + [w for name, value in (headers or {}).items() for w in ("-H", f"{name}:{value}")]


def profile(
    program: Program,
    url: str,
    turns: Sequence[Turn] | None,
    source: PromptSource,
    out: Path,
    window: Window | None,
    think_s: float,
    **how: Any,
) -> tuple[list[Outcome], tuple[float, float] | None]:
    """Send the turns once, each with the same body as our client. Return the outcomes and, with a
    ``window``, the span in which it was open.

    ``turns``: of a trace, in order; None: those of the program's own file. ``think_s``: pause
    between two turns. ``how``: further arguments of ``command``.

    Raises:
        RunFailed: AIPerf cannot be run, or has no result; the message has the end of its log.
    """
    out.mkdir(parents=True, exist_ok=True)
    requests = None
    if turns is not None:
        # Send whole bodies. From lengths and hash ids AIPerf makes a turn that is appended to
        # earlier ones, while a trace's prompts are whole; and `completions` refuses a second turn.
        file, prompts, requests = out / "trace.jsonl", source.make(), len(turns)
        lines = (
            {
                "session_id": _session(turn),
                "timestamp": 1000 * turn.at_s,
                "delay": 1000 * think_s if turn.turn else 0,
                "payload": msgspec.Raw(body(prompts, turn.record, source)),
            }
            for turn in turns
            if turn.record is not None
        )
        file.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        program = msgspec.structs.replace(program, file=file)
    if window is not None:
        # Add requests that keep up the load while the last counted ones end.
        max_requests = window.warm_up + window.requests + 2 * (how["sessions"] or 0)
        requests = min(requests or max_requests, max_requests)
    words = command(program, url, out, requests=requests, **how)
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise RunFailed(f"--aiperf {program.path}: {error}") from error
    export = out / EXPORT
    if done.returncode or not export.exists():
        raise RunFailed(f"aiperf ended with {done.returncode}: {done.stdout[-2000:]}")
    return counted(outcomes(export, turns), window, how["sessions"] or 0)


def _session(turn: Turn) -> str:
    """Return the session's name; a request without one is a session."""
    return turn.session_id or f"i{turn.index}"


def outcomes(export: Path, turns: Sequence[Turn] | None) -> list[Outcome]:
    """Return the outcomes of an export's requests, by end. Its clock starts at the first request.
    ``turns``: the requests that were sent; None: only AIPerf knows them.

    Raises:
        RunFailed: a request is not one of ``turns``.
    """
    lines = [msgspec.json.decode(line) for line in export.read_bytes().splitlines()]
    lines = [x for x in lines if x["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    lines.sort(key=lambda line: line["metadata"]["request_start_ns"])
    zero = lines[0]["metadata"]["request_start_ns"] if lines else 0
    sent = {(_session(turn), turn.turn or 0): turn for turn in turns or ()}
    results = []
    for index, line in enumerate(lines):
        about, error = line["metadata"], line.get("error")
        # Times in milliseconds, and lists of them.
        values = {name: x["value"] for name, x in (line.get("metrics") or {}).items()}
        key = (about["conversation_id"], about["turn_index"])
        if turns is None:
            prompt, answer = (
                int(values.get(f"{side}_sequence_length", 0)) for side in ("input", "output")
            )
            turn = Turn(index, *key, prompt, answer, prompt, "ALL")
        elif (turn := sent.get(key)) is None:
            raise RunFailed(f"{export}: no record has turn {key[1]} of a session")
        started, finished = (
            (about[f"request_{name}_ns"] - zero) / 1e9 for name in ("start", "end")
        )
        ttft = _seconds(values.get("time_to_first_token"))
        results.append(
            Outcome(
                index=turn.index,
                session_id=turn.session_id,
                turn=turn.turn,
                prompt_tokens=int(values.get("usage_prompt_tokens") or turn.prompt_tokens),
                wanted_tokens=turn.wanted_tokens,
                trace_new_tokens=turn.new_tokens,
                output_tokens=int(values.get("output_sequence_length") or 0),
                request_class=turn.kind,
                scheduled_s=started,
                started_s=started,
                first_token_s=None if ttft is None else started + ttft,
                finished_s=finished,
                late_s=started - (about["credit_issued_ns"] - zero) / 1e9,
                ttft_s=ttft,
                tpot_s=_seconds(values.get("inter_token_latency")),
                e2e_s=_seconds(values.get("request_latency")) or finished - started,
                itl_s=tuple(ms / 1e3 for ms in values.get("inter_chunk_latency") or ()),
                error="aiperf" if error else None,
                message=f"{error.get('type')}: {error.get('message')}" if error else None,
            )
        )
    return sorted(results, key=lambda outcome: outcome.finished_s)


def counted(
    results: Sequence[Outcome], window: Window | None, sessions: int = 0
) -> tuple[list[Outcome], tuple[float, float] | None]:
    """Return the outcomes with ``counted`` set, and when the window was open, as in our loads."""
    load, counts = Counting(window, (), sessions), dict[int, bool]()
    steps = [(o.started_s, 1, n) for n, o in enumerate(results)]
    steps += [(o.finished_s, 0, n) for n, o in enumerate(results)]
    for time_s, begins, number in sorted(steps):
        if begins:
            counts[number] = load.begins(results[number].request_class, time_s)
        else:
            load.ended(counts.get(number, False))
    marked = [msgspec.structs.replace(o, counted=counts[n]) for n, o in enumerate(results)]
    return marked, load.span(max((o.finished_s for o in results), default=0.0))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
