"""What a decode pool holds, and what a prefill elsewhere costs and saves, by closed forms. Lengths
and pools in tokens, times in seconds.

python -m benchmark capacity --model qwen3-coder-30b-a3b --pool-gib 38
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from rich.console import Console

from benchmark.agentic.fleet.spec import load
from benchmark.harness import report
from benchmark.harness.command import reported
from benchmark.kv_transfer import shapes

FOLDER = Path(__file__).parent
GIB = 2**30
Amount = Annotated[float, msgspec.Meta(ge=0)]


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's costs. Every field but ``sources`` must say there where its number is from."""

    kv_token_bytes: int
    """All layers, all tensor parallel ranks."""
    prefill_batch_s: Amount
    prefill_token_s: Amount
    """A new token of a prompt."""
    prefill_pair_s: Amount
    """A pair of a new token and one that it attends to."""
    transfer: tuple[tuple[Annotated[float, msgspec.Meta(gt=0)], Amount], ...]
    """(bytes, seconds on the wire) over one link, by size; linear between the points. Below the
    first and beyond the last their own bandwidth holds; one point is a constant bandwidth."""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        fields = set(self.__struct_fields__) - {"sources"}
        if wrong := fields ^ set(self.sources):
            raise ValueError(f"sources: one for each of {sorted(fields)}; off by {sorted(wrong)}")
        if not self.transfer or list(self.transfer) != sorted(dict(self.transfer).items()):
            raise ValueError("transfer needs points of increasing size")

    def prefill_s(self, tokens: float) -> float:
        """Seconds for a prompt of ``tokens`` new tokens as a batch of its own."""
        pairs = tokens * tokens / 2
        return self.prefill_batch_s + self.prefill_token_s * tokens + self.prefill_pair_s * pairs

    def transfer_s(self, tokens: float) -> float:
        """Seconds on the wire for ``tokens`` tokens of KV."""
        size = tokens * self.kv_token_bytes
        sizes, seconds = zip((0.0, 0.0), *self.transfer, strict=True)
        beyond = max(1.0, size / sizes[-1])
        return float(np.interp(size, sizes, seconds)) * beyond


def load_costs(name: str) -> Costs:
    """``NAME.yaml`` beside this file, or a YAML or JSON file of one's own.

    Raises:
        ValueError: no such file, or a field is missing, unknown, wrong, or without a source.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        path = Path(name)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml")))
        raise ValueError(f"--costs {name}: choose from {names}, or give a file")
    return load(path, Costs)


def holds(
    pool: float, prefix: int, suffix: int, prefixes: int, *, shared: bool, reserved: int = 0
) -> int:
    """Requests that fit into one decode pool. Each has one of ``prefixes`` prefixes, a suffix of
    its own, and ``reserved`` tokens for its answer.

    With ``shared``, a prefix is held once however many use it; as many requests as there are
    prefixes are assumed to use different ones.
    """
    own = suffix + reserved
    alone = math.floor(pool / (prefix + own))
    if not shared or alone < prefixes:
        return alone
    return math.floor((pool - prefixes * prefix) / own)


@reported
def main(argv: list[str]) -> int:
    """Tables, and JSON into ``--out`` where it is given."""
    args, console = _arguments(argv), Console()
    shape = shapes.load(args.model, args.kv_dtype)
    costs = load_costs(args.costs)
    if costs.kv_token_bytes != shape.token_bytes:
        raise ValueError(
            f"--costs {args.costs} are of a model with {costs.kv_token_bytes:,} B of KV a token; "
            f"{shape.name} has {shape.token_bytes:,}: give the costs of this model"
        )
    pool = args.pool_tokens or math.floor(args.pool_gib * GIB / shape.token_bytes)
    workload = {"prefix": args.prefix, "suffix": args.suffix, "prefixes": args.prefixes}
    stock = holds(pool, **workload, shared=False, reserved=args.reserved)
    radix = holds(pool, **workload, shared=True, reserved=args.reserved)
    prompt = args.prefix + args.suffix
    rows = [
        ["KV of a token", f"{shape.token_bytes:,} B"],
        ["decode pool", f"{pool:,} tokens, {pool * shape.token_bytes / GIB:.1f} GiB"],
        ["one request", f"{prompt * shape.token_bytes / GIB:.2f} GiB"],
        ["requests that a pool holds", f"{stock:,}"],
        ["the same with shared prefixes", f"{radix:,}"],
        ["transfer of a whole prompt", f"{1e3 * costs.transfer_s(prompt):,.0f} ms"],
        ["transfer of a suffix", f"{1e3 * costs.transfer_s(args.suffix):,.0f} ms"],
    ]
    report.print_table(f"{shape.name}, one decode worker", ["", ""], rows, console)

    # Each of the streams would have stood still for the whole prefill.
    events = [
        {
            "tokens": tokens,
            "prefill_s": costs.prefill_s(tokens),
            "transfer_s": costs.transfer_s(tokens),
            "benefit_s": args.streams * costs.prefill_s(tokens),
        }
        for tokens in args.prefill_sizes
    ]
    rows = [
        [
            f"{of['tokens']:,}",
            f"{of['prefill_s']:.2f} s",
            f"{1e3 * of['transfer_s']:,.0f} ms",
            f"{of['benefit_s']:,.1f} s",
            f"{of['transfer_s'] / of['benefit_s']:.1%}",
        ]
        for of in events
    ]
    title = (
        f"prefill on another worker than {args.streams} decode streams: stall time saved, "
        "transfer time"
    )
    columns = ["tokens", "prefill", "transfer", "benefit", "transfer / benefit"]
    report.print_table(title, columns, rows, console)
    if args.out:
        content = {
            "shape": shape,
            "token_bytes": shape.token_bytes,
            "pool_tokens": pool,
            "workload": workload,
            "holds": {"stock": stock, "radix": radix},
            "isolation": events,
        }
        report.write_summary(args.out, content)
        console.print(f"written to {args.out}")
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
    add("--out", type=Path, help="JSON file of the numbers; default: none is written")
    return parser.parse_args(argv)
