"""What speculation changes for the decode radix cache: hits, bytes and accept length of one load.

Agents that share an instruction ask turn after turn, each on top of the answer before; with a draft
model and without one. Counts and bytes only: on a CPU a draft model of the target's size saves no
time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.decode_radix_cache import page
from benchmark.decode_radix_cache.conversations import Conversations
from benchmark.decode_radix_cache.drafts import Rates, rates, zeroing
from benchmark.harness import metrics, report
from benchmark.harness.client import Request, Result
from benchmark.harness.environment import describe
from benchmark.harness.models import own_draft
from benchmark.harness.pair import Pair, PairConfig
from benchmark.harness.servers import Sizes

ACCEPT_LENGTH = "sglang:spec_accept_length"


@dataclass(frozen=True)
class Load:
    """Lengths and pools in tokens."""

    agents: int = 8
    turns: int = 6
    examples: int = 6
    """Questions in the instruction that all agents share."""
    generated_tokens: int = 60
    pool: int = 30_000
    page_size: int = 16
    steps: int = 3
    """Of the draft model, with a chain of so many drafts."""


def drafting(model: Path, steps: int, algorithm: str = "EAGLE") -> tuple[str, ...]:
    """Arguments of a server whose draft model, of a chain of ``steps`` drafts, is ``model``."""
    return (
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(model)),
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(steps + 1)),
    )


def run(out: Path, console: Console, load: Load = Load()) -> int:  # noqa: B008
    """Measures all arms; non-zero where they answer differently or a request fails."""
    model = own_draft(out / "model-own-draft")
    raw = out / "speculation.requests.jsonl"
    raw.unlink(missing_ok=True)
    arms: dict[str, dict[str, float | None]] = {}
    answers: list[list[Result]] = []
    for name, steps in (("plain", 0), ("EAGLE", load.steps)):
        console.print(f"[bold]{name}[/]: starting fresh servers")
        with Pair(_config(model, steps, load), out / "logs" / f"speculation-{name}") as pair:
            results = _talk(pair, model, load)
            pair.check()  # also lets the last transfers be counted
            arms[name] = count(results, *pair.metrics())
        answers.append(results)
        report.write_requests(raw, name, results)
    drafts = {name: _rates(out, model, load, env, console) for name, env in _RATED.items()}
    same = report.same_answers(answers)
    content = {
        **describe(),
        "load": load,
        "outputs_identical": same,
        "arms": arms,
        "accept_rates": drafts,
    }
    summary = report.plain(content)
    title = f"{load.agents} agents of {load.turns} turns, pages of {load.page_size} tokens"
    report.print_table(title, *page.speculation(summary), console)
    report.print_table("drafts accepted, one step", *page.accepted(summary), console)
    report.write_summary(out / "speculation.summary.json", content)
    console.print("Outputs are identical." if same else "[red]Outputs differ, or one failed.[/]")
    return 0 if same else 1


#: What is done to the draft KV of shared prefixes, and the environment of decode that does it.
_RATED: dict[str, Mapping[str, str]] = {"kept": {}, "zeroed": zeroing()}


def _rates(out: Path, model: Path, load: Load, env: Mapping[str, str], console: Console) -> Rates:
    console.print(f"[bold]drafts[/]: starting fresh servers {dict(env) or ''}")
    config = dataclasses.replace(_config(model, 1, load), decode_env=env)
    with Pair(config, out / "logs" / f"drafts-{'zeroed' if env else 'kept'}") as pair:
        return rates(pair, model)


def _config(model: Path, steps: int, load: Load) -> PairConfig:
    sizes = Sizes(pool_tokens=load.pool, page_size=load.page_size)
    # One of the servers that waits would spin on one of the few cores.
    args = ("--sleep-on-idle", *(drafting(model, steps) if steps else ()))
    return PairConfig(
        model,
        radix=True,
        prefill_sizes=sizes,
        decode_sizes=sizes,
        prefill_args=args,
        decode_args=args,
    )


def _talk(pair: Pair, model: Path, load: Load) -> list[Result]:
    """All turns, one after the other, of all agents at once."""
    shots = Conversations(model, 1, load.examples)
    for _ in range(load.examples - 1):
        shots.answer([[]])
    chats = Conversations(model, load.agents, load.turns, shots.prompts[0])
    results: list[Result] = []
    for turn in range(load.turns):
        answered = pair.send(
            [
                Request(prompt, load.generated_tokens, label=f"{agent}/{turn}")
                for agent, prompt in enumerate(chats.prompts)
            ]
        )
        results += answered
        if turn < load.turns - 1:
            chats.answer([result.output_ids for result in answered])
    return results


def count(
    results: Sequence[Result], prefill: Mapping[str, float], decode: Mapping[str, float]
) -> dict[str, float | None]:
    """An arm, from the answers and the counters of fresh servers; SGLang's warm-up moves nothing.
    Accept lengths are tokens a step: as decode last reported it, and over all steps."""
    verified = sum(result.verify_steps for result in results)
    accepted = sum(result.accepted_tokens for result in results)
    return {
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "hit_tokens": decode[metrics.HIT_TOKENS],
        "moved_bytes": prefill[metrics.SENT_BYTES],
        "accept_length_gauge": decode.get(ACCEPT_LENGTH) if verified else None,
        "accept_length": 1 + accepted / verified if verified else None,
    }
