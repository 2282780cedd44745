"""What a decode pool holds, and what a prefill elsewhere costs and saves, by closed forms. Lengths
and pools in tokens, times in seconds.

python -m benchmark capacity --model qwen3-coder-30b-a3b --pool-gib 38
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.harness import report
from benchmark.harness.command import reported
from benchmark.kv_transfer import shapes

FOLDER = Path(__file__).parent
GIB = 2**30


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time on the wire for so many bytes over one link, linear between measured points."""

    curve: tuple[tuple[float, float], ...]
    """(bytes, seconds), by size. Below the first point and beyond the last their own bandwidth
    holds; one point is a constant bandwidth."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.curve]
        if not sizes or min(sizes) <= 0 or sizes != sorted(set(sizes)):
            raise ValueError("transfer.curve needs points of increasing, positive size")
        if any(seconds < 0 for _, seconds in self.curve):
            raise ValueError("transfer: times must not be negative")

    def seconds(self, size: float) -> float:
        """Seconds that ``size`` bytes take on the wire."""
        previous = (0.0, 0.0)
        for point in self.curve:
            if size <= point[0]:
                (x0, y0), (x1, y1) = previous, point
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
            previous = point
        return previous[1] * size / previous[0]


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's costs. Every field but ``sources`` must say there where its number is from."""

    kv_token_bytes: int
    """All layers, all tensor parallel ranks."""
    prefill_batch_s: float = 0.0
    prefill_token_s: float
    """A new token of a prompt."""
    prefill_pair_s: float = 0.0
    """A pair of a new token and one that it attends to."""
    transfer: Transfer
    sources: dict[str, str]

    def __post_init__(self) -> None:
        fields = set(self.__struct_fields__) - {"sources"}
        if wrong := fields ^ set(self.sources):
            raise ValueError(f"sources: one for each of {sorted(fields)}; off by {sorted(wrong)}")
        for name in fields - {"transfer"}:
            if not (value := getattr(self, name)) >= 0 or not math.isfinite(value):
                raise ValueError(f"{name} must be a number of 0 or more, not {value}")

    def prefill_s(self, tokens: float) -> float:
        """Seconds for a prompt of ``tokens`` new tokens as a batch of its own."""
        pairs = tokens * tokens / 2
        return self.prefill_batch_s + self.prefill_token_s * tokens + self.prefill_pair_s * pairs

    def transfer_s(self, tokens: float) -> float:
        """Seconds on the wire for ``tokens`` tokens of KV."""
        return self.transfer.seconds(tokens * self.kv_token_bytes)


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
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=Costs)  # JSON is YAML too
    except msgspec.DecodeError as error:
        raise ValueError(f"{path.name}: {error}") from error


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
    """A prefill event on an aggregated server of several decodes against the same apart."""

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
    """Tables, and JSON into ``--out`` where it is given."""
    args, console = _arguments(argv), Console()
    shape = shapes.load(args.model, args.kv_dtype)
    costs = load_costs(args.costs)
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
    report.print_table(f"{shape.name}, one decode worker", ["", ""], rows, console)

    events = [
        isolation(n, costs.prefill_s(n), costs.transfer_s(n), args.streams)
        for n in args.prefill_sizes
    ]
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
    if args.out:
        content = {
            "shape": shape,
            "token_bytes": shape.token_bytes,
            "pool_tokens": pool,
            "workload": load,
            "holds": {"stock": held[False], "radix": held[True]},
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
