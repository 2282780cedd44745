"""Capacity of a decode pool, by closed forms. Lengths and pools in tokens.

python -m benchmark capacity --model qwen3-coder-30b-a3b --pool-gib 38
"""

from __future__ import annotations

import argparse
import math

from rich.console import Console

from benchmark.harness import report
from benchmark.harness.command import reported
from benchmark.kv_transfer import shapes

GIB = 2**30


def holds(
    pool: float, prefix: int, suffix: int, prefixes: int, *, shared: bool, reserved: int = 0
) -> int:
    """Return the number of requests that fit into one decode pool.

    Each request has one of ``prefixes`` prefixes, a suffix of its own, and ``reserved`` tokens for
    its answer. With ``shared``, a prefix is held once for all requests that have it; the first
    ``prefixes`` requests are assumed to have different ones.
    """
    unshared = suffix + reserved
    without_sharing = math.floor(pool / (prefix + unshared))
    if not shared or without_sharing < prefixes:
        return without_sharing
    return math.floor((pool - prefixes * prefix) / unshared)


@reported
def main(argv: list[str]) -> int:
    """Print the table."""
    args = _arguments(argv)
    shape = shapes.load(args.model, args.kv_dtype)
    pool = args.pool_tokens or math.floor(args.pool_gib * GIB / shape.token_bytes)
    workload = {"prefix": args.prefix, "suffix": args.suffix, "prefixes": args.prefixes}
    stock = holds(pool, **workload, shared=False, reserved=args.reserved)
    radix = holds(pool, **workload, shared=True, reserved=args.reserved)
    rows = [
        ["KV of a token", f"{shape.token_bytes:,} B"],
        ["decode pool", f"{pool:,} tokens, {pool * shape.token_bytes / GIB:.1f} GiB"],
        ["one request", f"{(args.prefix + args.suffix) * shape.token_bytes / GIB:.2f} GiB"],
        ["requests that a pool holds", f"{stock:,}"],
        ["the same with shared prefixes", f"{radix:,}"],
    ]
    report.print_table(f"{shape.name}, one decode worker", ["", ""], rows, Console())
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark capacity")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-coder-30b-a3b",
        help="model: a name in benchmark/kv_transfer/shapes, or a folder with a config.json",
    )
    add("--kv-dtype", choices=sorted(shapes.DTYPES), help="dtype of the KV pool")
    add("--pool-gib", type=float, default=38.0, help="KV pool of one decode worker, GiB")
    add("--pool-tokens", type=int, help="the same in tokens; overrides --pool-gib")
    add("--prefix", type=int, default=50_000, help="tokens")
    add("--suffix", type=int, default=4500, help="tokens")
    add("--prefixes", type=int, default=20, help="number of distinct prefixes")
    add("--reserved", type=int, default=512, help="tokens reserved for an output")
    return parser.parse_args(argv)
