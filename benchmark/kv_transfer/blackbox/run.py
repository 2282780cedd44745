"""Asks a real pair for prompts of each size, each one twice, and joins the servers' event logs."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.harness.arm import warm_up
from benchmark.harness.client import Request, Result
from benchmark.harness.environment import describe
from benchmark.harness.models import random_qwen3
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.report import write_summary
from benchmark.harness.servers import Sizes
from benchmark.harness.workload import kv_bytes_per_token, token_range
from benchmark.kv_transfer.blackbox import report
from benchmark.kv_transfer.blackbox.report import Asked
from benchmark.kv_transfer.blackbox.stages import read, stages
from sglang.srt.patchset.environment import EVENT_LOG

SHAPE = {"layers": 4, "heads": 1, "kv_heads": 1, "head_dim": 64}
"""2 KiB of KV a token, and as little attention for it as can be: prefill of long prompts on a CPU
takes most of the time of a run, and is not what it is about."""

GENERATED_TOKENS = 4
FIRST, AGAIN = "first", "again"


@dataclass(frozen=True)
class Load:
    """Lengths in tokens."""

    sizes: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    repeats: int = 3
    page_size: int = 16
    chunked_prefill_tokens: int = 8192
    seed: int = 0


def run(out: Path, model: Path | None, console: Console, load: Load) -> int:
    """Measures, writes the results, prints the tables; non-zero where there are ``faults``.

    Raises:
        ServerFailed: a server died.
        ValueError: a size that cannot be asked.
    """
    made = model is None
    model = model or random_qwen3(out / "model", **SHAPE)
    check_sizes(model, load, may_stretch=made)
    logs = out / "logs"
    for old in (logs / "events").glob("*.jsonl"):
        old.unlink()  # they are appended to
    with Pair(configure(model, load, logs), logs) as pair:
        seconds = warm_up(pair, token_range(model), tokens=512)
        console.print(f"up, warmed up in {seconds:.1f} s")
        results = [ask(pair, request, console) for request in requests(model, load)]
        pair.check()  # also lets the last records be written
    asked = join(results, logs / "events")

    machine = describe()
    kv = f"{kv_bytes_per_token(model):,} B of KV a token"
    where = f"nixl, pages of {load.page_size}, {kv}, {load.repeats} prompts a size"
    report.write_lines(out / "blackbox.requests.jsonl", asked)
    write_summary(
        out / "blackbox.summary.json",
        {**machine, "load": dataclasses.asdict(load), "model": SHAPE if made else model.name},
    )
    run_of = f"{machine['date']}, {machine['machine']}, commit {machine['commit']}"
    intro = f"# Stages by length of the prompt\n\n{run_of}; {where}. Milliseconds, p50 of each."
    report.write_markdown(out / "blackbox.md", intro, asked)
    for again, title in report.TITLES.items():
        report.print_stages(f"{title}; {where}", [a for a in asked if a.again == again], console)
    report.draw(out / "blackbox.png", asked)
    problems = faults(results, asked, load.page_size)
    for problem in problems:
        console.print(f"[red]{problem}[/]", highlight=False)
    return 1 if problems else 0


def configure(model: Path, load: Load, logs: Path) -> PairConfig:
    """Pools that hold the longest prompt twice: asked again, it is still in the tree."""
    longest = max(load.sizes) + GENERATED_TOKENS
    sizes = Sizes(
        pool_tokens=2 * longest + 4096,
        page_size=load.page_size,
        chunked_prefill_tokens=load.chunked_prefill_tokens,
    )
    # Random weights know no context length: rotary positions are computed as far as they are asked.
    positions = json.dumps({"max_position_embeddings": longest + 64})
    stretch = ("--json-model-override-args", positions) if context(model) <= longest else ()
    return PairConfig(
        model,
        radix=True,
        prefill_sizes=sizes,
        decode_sizes=sizes,
        prefill_args=stretch,
        decode_args=stretch,
        env={EVENT_LOG.name: str(logs / "events")},
    )


def context(model: Path) -> int:
    """Tokens that a model folder's model takes."""
    config = json.loads((model / "config.json").read_text())
    return int(config["max_position_embeddings"])


def check_sizes(model: Path, load: Load, *, may_stretch: bool) -> None:
    """
    Raises:
        ValueError: a size is no whole number of pages, or longer than the context of a model that
            was given.
    """
    for size in load.sizes:
        if size % load.page_size:
            raise ValueError(f"--sizes: {size} is no whole number of pages of {load.page_size}")
        if not may_stretch and size + GENERATED_TOKENS >= context(model):
            raise ValueError(f"--sizes: {size} does not fit {model.name}'s {context(model)} tokens")


def requests(model: Path, load: Load) -> list[Request]:
    """Each prompt twice in a row; prompts share nothing. A request's label is its ``rid``, too."""
    rng = random.Random(load.seed)
    vocabulary = token_range(model)
    # First tokens differ, so that no prompt is another's prefix even by chance.
    firsts = iter(rng.sample(vocabulary, len(load.sizes) * load.repeats))
    found = []
    for repeat in range(load.repeats):
        for size in load.sizes:
            prompt = [next(firsts), *rng.choices(vocabulary, k=size - 1)]
            for turn in (FIRST, AGAIN):
                label = f"{size}-{repeat}-{turn}"
                extra = {"rid": label}
                found.append(Request(prompt, GENERATED_TOKENS, label=label, extra=extra))
    return found


def ask(pair: Pair, request: Request, console: Console) -> Result:
    """One at a time: what a request waits for is then its own."""
    [result] = pair.send([request])
    console.print(f"  {request.label}: {result.error or f'{result.ttft_s:.3f} s'}", highlight=False)
    return result


def join(results: Sequence[Result], events: Path) -> list[Asked]:
    """The answered requests with their rooms' stages; a request without a room has no entry."""
    rooms = {room.rid: room for room in stages(read(events))}
    return [
        Asked(
            label=result.label,
            tokens=result.prompt_tokens,
            again=result.label.endswith(AGAIN),
            ttft_s=result.ttft_s,
            cached_tokens=result.cached_tokens,
            stages=rooms[result.label],
        )
        for result in results
        if result.error is None and result.label in rooms
    ]


def faults(results: Sequence[Result], asked: Sequence[Asked], page_size: int) -> list[str]:
    """What must not be, in words: a request that failed, answers that differ, records that are not
    there, and a tree that holds other than the whole pages of what was asked before."""
    found = [f"{r.label}: {r.error}" for r in results if r.error]
    joined = {a.label: a.stages for a in asked}
    answers = {r.label: r.answer for r in results if r.error is None}
    for label, answer in answers.items():
        first = label.replace(AGAIN, FIRST)
        if answer != answers.get(first, answer):
            found.append(f"{label}: another answer than {first}")
        if label not in joined:
            found.append(f"{label}: the decode server's event log does not know it")
    for one in asked:
        room = one.stages
        if room.missing:
            found.append(
                f"{one.label}: room {room.room} has no record of {', '.join(room.missing)}"
            )
        expected = one.tokens // page_size * page_size if one.again else 0
        if room.prefix_tokens != expected:
            found.append(
                f"{one.label}: decode had {room.prefix_tokens} of its tokens, not {expected}"
            )
    return found
