"""What a decode pool holds, and what a prefill elsewhere saves, by closed forms.

python -m benchmark.agentic capacity --model qwen3-coder-30b-a3b --pool-gib 38
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from rich.console import Console

from benchmark.agentic.capacity import costs as cost_files
from benchmark.agentic.capacity import formulas
from benchmark.agentic.capacity.formulas import GIB, Isolation, Workload
from benchmark.harness import report
from benchmark.harness.command import status
from benchmark.kv_transfer import shapes
from benchmark.traces.read import read
from benchmark.traces.sharing import facts


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console()
    return status(lambda: run(args, console), console)


def run(args: argparse.Namespace, console: Console) -> int:
    """Tables to ``console``; JSON and a plot into ``--out``."""
    shape = shapes.load(args.model, args.kv_dtype)
    costs = cost_files.load(args.costs)
    if costs.kv_token_bytes != shape.token_bytes:
        raise ValueError(
            f"--costs {args.costs} are of a model with {costs.kv_token_bytes:,} B of KV a token; "
            f"{shape.name} has {shape.token_bytes:,}: give costs of its own"
        )
    pool = args.pool_tokens or formulas.pool_tokens(args.pool_gib * GIB, shape.token_bytes)
    load = Workload(args.prefix, args.suffix, args.prefixes)
    reserved = args.reserved
    held = {
        shared: formulas.holds(load, pool, shared=shared, reserved=reserved)
        for shared in (False, True)
    }
    rows = [
        ["KV of a token", f"{shape.token_bytes:,} B"],
        ["decode pool", f"{pool:,} tokens, {pool * shape.token_bytes / GIB:.1f} GiB"],
        ["one request", f"{load.prompt * shape.token_bytes / GIB:.2f} GiB"],
        ["requests that a pool holds", f"{held[False]:,}"],
        ["the same with shared prefixes", f"{held[True]:,}"],
        ["transfer of a whole prompt", f"{1e3 * costs.transfer_s(load.prompt):,.0f} ms"],
        ["transfer of a suffix", f"{1e3 * costs.transfer_s(load.suffix):,.0f} ms"],
    ]
    content: dict[str, object] = {
        "shape": shape,
        "token_bytes": shape.token_bytes,
        "pool_tokens": pool,
        "workload": load,
        "holds": {"stock": held[False], "radix": held[True]},
    }
    if args.trace:
        records = list(read(args.trace))
        known = facts(records)
        content["trace"] = known
        rows += [[field, f"{value:,.4g}"] for field, value in dataclasses.asdict(known).items()]
    report.print_table(f"{shape.name}, one decode worker", ["", ""], rows, console)

    events = [
        formulas.isolation(n, costs.request_prefill_s(n), costs.transfer_s(n), args.streams)
        for n in args.prefill_sizes
    ]
    _print_isolation(events, args.streams, console)
    content["isolation"] = events

    report.write_summary(args.out / "capacity.json", content)
    console.print(f"capacity.json in {args.out}")
    return 0


def _print_isolation(events: list[Isolation], streams: int, console: Console) -> None:
    report.print_table(
        f"a prefill apart from {streams} decode streams: what it saves them, and its transfer",
        ["tokens", "prefill", "transfer", "benefit", "transfer / benefit"],
        [
            [
                f"{e.tokens:,}",
                f"{e.prefill_s:.2f} s",
                f"{1e3 * e.transfer_s:,.0f} ms",
                f"{e.benefit_s:,.1f} s",
                f"{e.ratio:.1%}",
            ]
            for e in events
        ],
        console,
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic capacity")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-coder-30b-a3b",
        help="a name in benchmark/kv_transfer/shapes, or a folder with a config.json",
    )
    add("--kv-dtype", choices=sorted(shapes.DTYPES), help="of the pool")
    add("--costs", default="qwen3-coder-30b-h20", help="of this model: a name, or a YAML file")
    add("--pool-gib", type=float, default=38.0, help="KV of one decode worker")
    add("--pool-tokens", type=int, help="the same in tokens; overrides it")
    add("--prefix", type=int, default=50_000, help="tokens")
    add("--suffix", type=int, default=4500, help="tokens")
    add("--prefixes", type=int, default=20, help="distinct ones")
    add("--reserved", type=int, default=512, help="tokens kept for an answer")
    add("--streams", type=int, default=8, help="decodes that a prefill would stall")
    add("--prefill-sizes", type=int, nargs="+", default=[2000, 33_000, 125_000], help="tokens")
    add("--trace", type=Path, help="a Mooncake trace, for what its requests share")
    add("--out", type=Path, default=Path("capacity-results"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
