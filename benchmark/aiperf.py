"""Loads servers by address with AIPerf, and reads its export into our outcomes.

AIPerf (https://github.com/ai-dynamo/aiperf; read with 0.13.0) has trace formats, sessions and an
OpenAI client of its own. It runs from an environment of its own, so that it pins nothing of ours:
``python -m venv aiperf && aiperf/bin/pip install aiperf``. Its prompts are text by its tokenizer.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmark.agentic.load.outcome import Classes, Outcome
from benchmark.agentic.load.plan import jobs
from benchmark.harness.command import RunFailed
from benchmark.traces.read import write
from benchmark.traces.record import Record
from benchmark.traces.sessions import annotate

EXPORT = "profile_export.jsonl"


class _Metadata(msgspec.Struct):
    conversation_id: str
    turn_index: int
    request_start_ns: int
    request_end_ns: int
    benchmark_phase: str = "profiling"


class _Value(msgspec.Struct):
    value: Any
    """A number, or a list of numbers; times in milliseconds."""


class _Error(msgspec.Struct):
    type: str | None = None
    message: str = ""


class _Line(msgspec.Struct):
    """Of ``profile_export.jsonl``: a request."""

    metadata: _Metadata
    metrics: dict[str, _Value] = {}
    error: _Error | None = None


def command(
    program: Path,
    url: str,
    trace: Path,
    out: Path,
    *,
    model: str,
    endpoint: str,
    block_tokens: int,
    requests: int,
    sessions: int | None,
    timeout_s: float,
    tokenizer: str = "builtin",
    headers: Mapping[str, str] | None = None,
) -> list[str]:
    """Of a profile of a trace: so many ``sessions`` at once, or None: at the trace's times."""
    how = ["--fixed-schedule"]
    if sessions is not None:
        how = ["--no-fixed-schedule", "--concurrency", str(sessions)]
    words = [str(program), "profile", "--model-names", model, "--url", url]
    words += ["--endpoint-type", endpoint, "--streaming", "--use-server-token-count"]
    words += ["--custom-dataset-type", "mooncake_trace", "--input-file", str(trace)]
    words += ["--prompt-input-tokens-block-size", str(block_tokens), "--tokenizer", tokenizer]
    words += [*how, "--request-count", str(requests), "--extra-inputs", "ignore_eos:true"]
    words += ["--request-timeout-seconds", f"{timeout_s:g}", "--ui", "none"]
    words += ["--output-artifact-dir", str(out)]
    return words + [w for name, value in (headers or {}).items() for w in ("-H", f"{name}:{value}")]


def profile(
    program: Path, url: str, records: Sequence[Record], out: Path, classes: Classes, **how: Any
) -> list[Outcome]:
    """Sends the records once. ``how``: the rest of ``command``.

    Raises:
        RunFailed: AIPerf cannot be run, or has no result; the message has the end of its log.
    """
    out.mkdir(parents=True, exist_ok=True)
    named = list(annotate(records, how["block_tokens"]))
    write(out / "trace.jsonl", named)
    words = command(program, url, out / "trace.jsonl", out, requests=len(named), **how)
    try:
        ended = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise RunFailed(f"--aiperf {program}: {error}") from error
    export = out / EXPORT
    if ended.returncode or not export.exists():
        raise RunFailed(f"aiperf ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return outcomes(export, named, classes, how["block_tokens"])


def outcomes(
    export: Path, records: Sequence[Record], classes: Classes, block_tokens: int
) -> list[Outcome]:
    """Of an export's requests, by end. Its clock's 0 is the first request.

    Raises:
        RunFailed: a request is not of these records.
    """
    sent = {}
    for job in jobs(records, block_tokens):
        turn = job.turn(classes)
        sent[turn.session_id or f"i{turn.index}", turn.turn or 0] = turn
    lines = [
        msgspec.json.decode(line, type=_Line) for line in export.read_bytes().splitlines() if line
    ]
    lines = [line for line in lines if line.metadata.benchmark_phase == "profiling"]
    zero = min((line.metadata.request_start_ns for line in lines), default=0)
    found = []
    for line in sorted(lines, key=lambda line: line.metadata.request_end_ns):
        about, of = line.metadata, {name: each.value for name, each in line.metrics.items()}
        turn = sent.get((about.conversation_id, about.turn_index))
        if turn is None:
            raise RunFailed(f"{export}: no record has turn {about.turn_index} of a session")
        started, finished = (
            (at - zero) / 1e9 for at in (about.request_start_ns, about.request_end_ns)
        )
        ttft = _seconds(of.get("time_to_first_token"))
        found.append(
            Outcome(
                index=turn.index,
                session_id=turn.session_id,
                turn=turn.turn,
                prompt_tokens=int(of.get("usage_prompt_tokens") or turn.prompt_tokens),
                wanted_tokens=turn.wanted_tokens,
                trace_new_tokens=turn.new_tokens,
                output_tokens=int(of.get("output_sequence_length") or 0),
                request_class=turn.kind,
                scheduled_s=started,
                started_s=started,
                first_token_s=None if ttft is None else started + ttft,
                finished_s=finished,
                late_s=0.0,
                ttft_s=ttft,
                tpot_s=_seconds(of.get("inter_token_latency")),
                e2e_s=_seconds(of.get("request_latency")) or finished - started,
                itl_s=tuple(each / 1e3 for each in of.get("inter_chunk_latency") or ()),
                error=None if line.error is None else "aiperf",
                message=None if line.error is None else f"{line.error.type}: {line.error.message}",
            )
        )
    return found


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
