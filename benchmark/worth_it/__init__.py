"""``python -m benchmark worth-it``: does the package, or PD itself, pay for a workload? Computed,
without a GPU; the forms are in ``arithmetic``, and docs/operations/sizing.md has an example.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmark.harness import report
from benchmark.harness.command import reported
from benchmark.kv_transfer import shapes
from benchmark.worth_it import arithmetic
from benchmark.worth_it.estimate import Estimate
from benchmark.worth_it.words import GIB, UNKNOWN, answers, notes, terms

TITLE = "{}, a mean turn"


@reported
def main(argv: list[str]) -> int:
    """Print the table, the answers and what they leave out; draw the picture."""
    args = _parser().parse_args(argv)
    estimate = made(args)
    # A pipe has no width, and the default of 80 columns would wrap the table.
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = [list(term) for term in terms(estimate)]
    report.print_table(TITLE.format(estimate.shape.name), ["", "formula", "value"], rows, console)
    for text in (*answers(estimate), *notes(estimate)):
        console.print(f"- {text}", highlight=False)
    console.print("\nNot known from arithmetic:", highlight=False)
    for text in UNKNOWN:
        console.print(f"- {text}", highlight=False)
    if args.out:
        from benchmark.worth_it.picture import draw

        draw(estimate, args.out)
        print(f"Picture: {args.out}")
    return 0


def page(words: list[str]) -> str:
    """Return the table and the answers as Markdown, for the arguments of the command."""
    estimate = made(_parser().parse_args(words))
    table = report.markdown(["term", "formula", "value"], [[*term] for term in terms(estimate)])
    return table + "\n" + "".join(f"- {text}\n" for text in answers(estimate))


def made(args: argparse.Namespace) -> Estimate:
    """Return the estimate of parsed arguments.

    Raises:
        ValueError: arguments contradict each other; the message names the flags.
    """
    shape = shapes.load(args.model, args.kv_dtype)
    if not shape.mla and max(shape.kv_heads, args.tp) % min(shape.kv_heads, args.tp):
        raise ValueError(f"--tp {args.tp} and {shape.kv_heads} KV heads: one must divide the other")
    rank_bytes = shape.on_rank(args.tp).token_bytes
    pool = args.pool_tokens or math.floor(args.pool_gib * GIB / rank_bytes)
    if args.trace:
        work = arithmetic.of_trace(_described(args.trace), args.prefixes, args.sessions)
    else:
        sizes = (args.prefix, args.new, args.answer, args.turns)
        work = arithmetic.of_sizes(*sizes, args.prefixes, args.sessions)
    if work.prompt + work.answer > pool:
        raise ValueError(
            f"a prompt of {work.prompt:,.0f} tokens and its answer do not fit into a pool of "
            f"{pool:,}: raise --pool-gib, or lower --prefix or --turns"
        )
    rates = None
    if args.network_gb_s and args.prefill_tokens_per_s:
        local = args.local_tokens_per_s or args.prefill_tokens_per_s
        wire, step_s = args.network_gb_s * 1e9, (args.decode_step_ms or 0.0) / 1e3
        rates = arithmetic.Rates(args.prefill_tokens_per_s, local, wire, step_s)
    elif args.network_gb_s or args.prefill_tokens_per_s:
        raise ValueError("give --network-gb-s and --prefill-tokens-per-s together")
    return Estimate(
        shape,
        work,
        pool,
        page=args.page_size,
        ranks=args.tp,
        hit_rate=args.hit_rate,
        rates=rates,
        chunk=args.chunk_tokens,
        itl_s=args.itl_ms / 1e3 if args.itl_ms else None,
        running=args.running,
        prefill_servers=args.prefill_servers,
        decode_servers=args.decode_servers,
    )


def _described(path: Path) -> arithmetic.Description:
    from benchmark.traces.describe import describe
    from benchmark.traces.record import read
    from benchmark.traces.sample import survey
    from benchmark.traces.sessions import annotate

    return describe(survey(annotate(read(path))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark worth-it",
        description="Computes what the decode radix cache, local turns and PD itself give for a "
        "workload. Needs no GPU and no server.",
    )
    add = parser.add_argument
    about = "name in the table of models, name on Hugging Face, or path of a config.json"
    add("--model", default="Qwen3-32B", help=f"{about}; known: {', '.join(shapes.names())}")
    add("--kv-dtype", choices=sorted(shapes.DTYPES), help="dtype of the KV pool")
    add("--page-size", type=_whole(1), default=64, help="tokens of a page")
    add(
        "--tp",
        type=_whole(1),
        default=1,
        help="tensor parallel ranks of a server. With attention data parallelism: --tp-size / "
        "--dp-size, and count each data parallel rank as a server: number of servers, network, "
        "speeds and running requests",
    )
    pool = parser.add_mutually_exclusive_group(required=True)
    pool.add_argument("--pool-gib", type=_number(), help="KV pool of one decode rank, GiB")
    pool.add_argument("--pool-tokens", type=_whole(1), help="or in tokens (max_total_num_tokens)")
    add("--prefix", type=_whole(0), default=0, help="P: tokens that several sessions share")
    add("--prefixes", type=_whole(1), default=1, help="distinct prefixes in use at once")
    add("--new", type=_whole(1), default=1000, help="N: new tokens of a turn")
    add("--answer", type=_whole(1), default=300, help="A: tokens of an answer")
    add("--turns", type=_whole(1), default=10, help="turns of a session")
    add("--sessions", type=_whole(1), default=32, help="sessions at once")
    about = "instead of these lengths: a trace in Mooncake's format; `convert` makes one of logs"
    add("--trace", type=Path, help=about)
    about = "measured share of prompt tokens that decode holds, instead of the computed one"
    add("--hit-rate", type=_share, help=about)
    about = "W: GB/s into a decode server, over all its links"
    add("--network-gb-s", type=_number(), help=about)
    add("--prefill-tokens-per-s", type=_number(), help="Vp: of a prefill server")
    about = "Vd: of a decode server in a chunk (default: as prefill)"
    add("--local-tokens-per-s", type=_number(), help=about)
    add("--decode-step-ms", type=_number(), help="s: time of a decode step at your batch")
    add("--itl-ms", type=_number(), help="acceptable gap between two tokens (SLO)")
    about = "largest chunk of a local turn (SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK)"
    add("--chunk-tokens", type=_whole(1), default=512, help=about)
    add("--running", type=_whole(1), help="B: running requests of a decode server")
    add("--prefill-servers", type=_whole(1), default=1)
    add("--decode-servers", type=_whole(1), default=1)
    add("--out", type=Path, help="file for a picture (.svg, .png)")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        number = int(text.replace(",", ""))
        if number < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more: {text}")
        return number

    return whole


def _number() -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must be above 0: {text}")
        return value

    return number


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1: {text}")
    return value
