"""What a decode pool holds, and what a prefill elsewhere costs and saves, by closed forms. Lengths
and pools in tokens, times in seconds.

python -m benchmark.agentic capacity --model qwen3-coder-30b-a3b --pool-gib 38
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmark.agentic.model import costs as cost_files
from benchmark.harness import report
from benchmark.harness.command import reported
from benchmark.kv_transfer import shapes

GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """A steady stream of requests that each start with one of a few prefixes."""

    prefix: int
    suffix: int
    prefixes: int
    """Distinct ones that are in use together."""

    @property
    def prompt(self) -> int:
        return self.prefix + self.suffix


def holds(workload: Workload, pool: float, *, shared: bool, reserved: float = 0.0) -> int:
    """Requests that fit into one decode pool.

    ``reserved``: tokens kept for each one's answer. With ``shared``, a prefix is held once however
    many use it; as many requests as there are prefixes are assumed to use different ones.
    """
    own = workload.suffix + reserved
    whole = workload.prefix + own
    alone = math.floor(pool / whole)
    if not shared or alone < workload.prefixes:
        return alone
    return math.floor((pool - workload.prefixes * workload.prefix) / own)


def pool_tokens(pool_bytes: float, token_bytes: int) -> int:
    """Tokens in so many bytes of KV."""
    return math.floor(pool_bytes / token_bytes)


@dataclass(frozen=True)
class Isolation:
    """A prefill event on an aggregated server of ``streams`` decodes against the same apart."""

    tokens: int
    prefill_s: float
    transfer_s: float
    benefit_s: float
    """Decode time that is not lost: each stream would have stood still for the prefill."""

    @property
    def ratio(self) -> float:
        """Transfer charge over benefit."""
        return self.transfer_s / self.benefit_s


def isolation(
    tokens: int, prefill_s: float, transfer_s: float, streams: int, slowdown: float = math.inf
) -> Isolation:
    """The corrected accounting of MB2: ``streams * prefill_s * (1 - 1 / slowdown)``.

    ``slowdown``: TPOT during the prefill over TPOT without; infinite where decode stands still.
    """
    return Isolation(tokens, prefill_s, transfer_s, streams * prefill_s * (1 - 1 / slowdown))


@reported
def main(argv: list[str]) -> int:
    """Tables, and JSON into ``--out``."""
    args, console = _arguments(argv), Console()
    shape = shapes.load(args.model, args.kv_dtype)
    costs = cost_files.load(args.costs)
    if costs.kv_token_bytes != shape.token_bytes:
        raise ValueError(
            f"--costs {args.costs} are of a model with {costs.kv_token_bytes:,} B of KV a token; "
            f"{shape.name} has {shape.token_bytes:,}: give the costs of this model"
        )
    pool = args.pool_tokens or pool_tokens(args.pool_gib * GIB, shape.token_bytes)
    load = Workload(args.prefix, args.suffix, args.prefixes)
    held = {
        shared: holds(load, pool, shared=shared, reserved=args.reserved) for shared in (False, True)
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
    report.print_table(f"{shape.name}, one decode worker", ["", ""], rows, console)

    events = [
        isolation(n, costs.request_prefill_s(n), costs.transfer_s(n), args.streams)
        for n in args.prefill_sizes
    ]
    content["isolation"] = events
    title = (
        f"prefill on another worker than {args.streams} decode streams: stall time saved, "
        "transfer time"
    )
    columns = ["tokens", "prefill", "transfer", "benefit", "transfer / benefit"]
    cells = [
        [
            f"{e.tokens:,}",
            f"{e.prefill_s:.2f} s",
            f"{1e3 * e.transfer_s:,.0f} ms",
            f"{e.benefit_s:,.1f} s",
            f"{e.ratio:.1%}",
        ]
        for e in events
    ]
    report.print_table(title, columns, cells, console)

    report.write_summary(args.out / "capacity.json", content)
    console.print(f"capacity.json in {args.out}")
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.agentic capacity")
    add = parser.add_argument
    add(
        "--model",
        default="qwen3-coder-30b-a3b",
        help="model: a name in benchmark/kv_transfer/shapes, or a folder with a config.json",
    )
    add("--kv-dtype", choices=sorted(shapes.DTYPES), help="dtype of the KV pool")
    add(
        "--costs",
        default="qwen3-coder-30b-h20",
        help="costs of this model: a name, or a YAML file",
    )
    add("--pool-gib", type=float, default=38.0, help="KV pool of one decode worker, GiB")
    add("--pool-tokens", type=int, help="the same in tokens; overrides --pool-gib")
    add("--prefix", type=int, default=50_000, help="tokens")
    add("--suffix", type=int, default=4500, help="tokens")
    add("--prefixes", type=int, default=20, help="number of distinct prefixes")
    add("--reserved", type=int, default=512, help="tokens reserved for an output")
    add("--streams", type=int, default=8, help="decode streams that a prefill would stall")
    add("--prefill-sizes", type=int, nargs="+", default=[2000, 33_000, 125_000], help="tokens")
    add("--out", type=Path, default=Path("capacity-results"))
    return parser.parse_args(argv)
