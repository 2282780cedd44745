"""What a prefill, a transfer and a decode step take. Pure arithmetic on numbers from a file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent / "costs"


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time on the wire for so many bytes over one link, linear between measured points."""

    curve: tuple[tuple[float, float], ...]
    """(bytes, seconds), by size. Below the first point and beyond the last their own bandwidth
    holds; one point is a constant bandwidth."""
    latency_s: float = 0.0
    """From a transfer's end to the request in decode's batch queue; the link is free meanwhile."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.curve]
        if not sizes or min(sizes) <= 0 or sizes != sorted(set(sizes)):
            raise ValueError("transfer.curve needs points of increasing, positive size")
        if self.latency_s < 0 or any(seconds < 0 for _, seconds in self.curve):
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
    step_s: float
    """A decode step, whatever its batch."""
    step_request_s: float = 0.0
    """A request of the batch."""
    step_context_s: float = 0.0
    """A token of context of the batch, shared or not: attention reads it once a request."""
    transfer: Transfer
    sources: dict[str, str]

    def __post_init__(self) -> None:
        fields = set(self.__struct_fields__) - {"sources"}
        if wrong := fields ^ set(self.sources):
            raise ValueError(f"sources: one for each of {sorted(fields)}; off by {sorted(wrong)}")
        for name in fields - {"transfer"}:
            if not (value := getattr(self, name)) >= 0 or not math.isfinite(value):
                raise ValueError(f"{name} must be a number of 0 or more, not {value}")

    def prefill_s(self, new: float, context: float = 0.0) -> float:
        """Seconds for ``new`` tokens behind ``context`` others, a batch's own cost left out."""
        return self.prefill_token_s * new + self.prefill_pair_s * new * (context + new / 2)

    def request_prefill_s(self, new: float, context: float = 0.0) -> float:
        """The same as a batch of its own."""
        return self.prefill_batch_s + self.prefill_s(new, context)

    def step_of(self, batch: float, context: float) -> float:
        """Seconds of one step of ``batch`` requests with ``context`` tokens in all."""
        return self.step_s + self.step_request_s * batch + self.step_context_s * context

    def steps_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of ``steps`` steps of one batch; each request grows by a token a step."""
        growth = self.step_context_s * batch * steps * (steps - 1) / 2
        return steps * self.step_of(batch, context) + growth

    def steps_in(self, seconds: float, batch: int, context: int) -> int:
        """Whole steps that fit into ``seconds``, inverse of ``steps_s``."""
        step, grow = self.step_of(batch, context), self.step_context_s * batch
        if step <= 0:
            raise ValueError("a decode step must take time: step_s is 0")
        if grow * seconds < 1e-9 * step * step:
            guess = int(seconds / step)
        else:
            slope = step - grow / 2
            guess = int((math.sqrt(slope * slope + 2 * grow * seconds) - slope) / grow)
        while guess > 0 and self.steps_s(guess, batch, context) > seconds:
            guess -= 1
        while self.steps_s(guess + 1, batch, context) <= seconds:
            guess += 1
        return guess

    def transfer_s(self, tokens: float) -> float:
        """Seconds on the wire for ``tokens`` tokens of KV."""
        return self.transfer.seconds(tokens * self.kv_token_bytes)


def load(name: str) -> Costs:
    """``costs/NAME.yaml``, or a YAML or JSON file of one's own.

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
