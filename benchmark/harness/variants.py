"""What the servers of a comparison's arms run: the stock release, this package, its flags.

Two things differ between the stock release and a decode server with the radix flag: the flag
itself, and what the package does without any, above all NIXL's progress thread, which sleeps here
and spins in stock. On few cores the thread alone is worth much, so that every comparison has an arm
without flags.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

#: Pause of NIXL's progress thread in microseconds; 0 spins, as in the stock release (on prefill, at
#: a lower priority than there).
PROGRESS_DELAY = "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY"


#: Decode computes every turn within the limit itself, whatever it costs.
LOCAL_ALWAYS = "SGLANG_DISAGGREGATION_DECODE_LOCAL_ALWAYS"


@dataclass(frozen=True)
class Variant:
    """How all servers of an arm are started; sizes are the comparison's, the same for all."""

    name: str
    #: ``SGLANG_PATCHSET=0``. The CPU stand-in stays on.
    stock: bool = False
    #: The decode server gets ``--disaggregation-decode-enable-radix-cache``.
    radix: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    #: Further arguments of the decode server.
    decode_args: tuple[str, ...] = ()


STOCK = Variant("stock", stock=True)
PATCHED = Variant("patched")
FLAG = Variant("flag", radix=True)
SPINNING = Variant("flag, spinning", radix=True, env={PROGRESS_DELAY: "0"})


def local_turns(tokens: int, *, always: bool = False, max_itl_ms: int = 0) -> Variant:
    """The radix flag, and decode computes turns of up to ``tokens`` new tokens itself.

    ``always``: all of them, instead of those that it expects to have done sooner than prefill;
    ``max_itl_ms``: with this bound on inter-token latency, if it is not 0.
    """
    tokens_arg = ("--disaggregation-decode-local-tokens", str(tokens))
    bound_arg = ("--disaggregation-decode-local-max-itl-ms", str(max_itl_ms))
    return Variant(
        "local turns",
        radix=True,
        env={LOCAL_ALWAYS: "1"} if always else {},
        decode_args=(*tokens_arg, *(bound_arg if max_itl_ms else ())),
    )


VARIANTS: Mapping[str, Callable[[int], Variant]] = {
    "stock": lambda tokens: STOCK,
    "patched": lambda tokens: PATCHED,
    "radix": lambda tokens: FLAG,
    "spinning": lambda tokens: SPINNING,
    "local": local_turns,
    "local-always": partial(local_turns, always=True),
    "local-100ms": partial(local_turns, max_itl_ms=100),
    "local-50ms": partial(local_turns, max_itl_ms=50),
}
"""By the names that files use; of the tokens of a local turn."""


def variants(*, spinning: bool = False) -> tuple[Variant, ...]:
    """The arms of a comparison, in the order in which they are shown.

    ``spinning`` adds the flag with a progress thread that spins: against ``STOCK`` it shows the
    flag, against ``FLAG`` the thread.
    """
    return (STOCK, PATCHED, FLAG, *((SPINNING,) if spinning else ()))
