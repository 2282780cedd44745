"""The flags of the patch set, as a mixin for SGLang's ``ServerArgs``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.patchset import compat, compat_buffer_only
from sglang.srt.patchset.status import closure, examine, require_active, require_switches

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs as _Base
else:
    _Base = object


@dataclasses.dataclass
class DisaggArgs(_Base):
    """Adds the flags; where none is given, every method is the stock one, but that FP4 KV, which
    SGLang transfers wrongly, is refused on both servers of a pair."""

    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_local_tokens: int = 0
    disaggregation_decode_local_tokens_when_lost: int = 0
    disaggregation_decode_local_share: float = 0.5
    disaggregation_decode_local_max_itl_ms: float = 0.0
    hicache_host_memory_mode: str = "cache"
    hicache_buffer_pages: int | None = None

    @override
    def __post_init__(self) -> None:
        require_switches()
        if self.disaggregation_mode != "null":
            # What keeps it stock is said here, once, and not by each process of the server.
            examine(closure(compat.backend_groups(self)))
        compat.check_transferable(self)
        wanted = self.disaggregation_decode_enable_radix_cache
        if wanted:
            # Here disable_radix_cache is still what the user passed, and the checks also reach the
            # model paths ("dummy") for which SGLang skips the rest.
            compat.check_explicit_disable(self)
            compat.check_decode_radix_args(self)
            require_active(compat.FLAG, *compat.groups(self))
        compat.check_local_turns(self)
        compat_buffer_only.check_given(self)
        super().__post_init__()
        if compat_buffer_only.wanted(self):
            require_active(compat_buffer_only.ON, compat_buffer_only.GROUP)
            compat_buffer_only.complete(self)
        else:
            compat.warn_drafts_behind_hicache(self)
        if wanted:
            # Once more on the values that SGLang has filled in or changed.
            compat.check_decode_radix_args(self)
            compat.check_still_enabled(self)
            compat.warn_dp_attention(self)
            compat.attend_prefixes_whole(self)

    @override
    def _handle_model_specific_adjustments(self) -> None:
        # The first handler that has the model's configuration at hand.
        if self.disaggregation_decode_enable_radix_cache:
            compat.check_decode_radix_model(self.get_model_config(), self.speculative_algorithm)
        if compat_buffer_only.wanted(self):
            compat_buffer_only.check_model(self.get_model_config())
        super()._handle_model_specific_adjustments()

    @override
    def _handle_pd_disaggregation(self) -> None:
        # All that SGLang does here for a decode server is to turn the tree off (and to check the
        # staging buffer, which the flag refuses altogether).
        if not self.disaggregation_decode_enable_radix_cache:
            super()._handle_pd_disaggregation()

    @staticmethod
    @override
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        _upstream().add_cli_args(parser)
        group = parser.add_argument_group("sglang-disagg-patchset")
        group.add_argument(
            compat.FLAG,
            action="store_true",
            help="Decode server only: keep the KV of finished requests in a radix tree. The "
            "prefill server then sends only the pages that the tree does not hold. Needs "
            f"--disaggregation-transfer-backend {' or '.join(compat.DELTA_BACKENDS)}.",
        )
        group.add_argument(
            compat.LOCAL,
            type=int,
            default=0,
            metavar="TOKENS",
            help="Local prefill: the largest number of new tokens of a prompt that this decode "
            "server may compute itself. It does so if it expects to be done before the prefill "
            "server would have sent them. Needs the decode radix cache. Default: 0, never.",
        )
        group.add_argument(
            compat.LOCAL_WHEN_LOST,
            "--disaggregation-decode-local-tokens-when-lost",
            dest="disaggregation_decode_local_tokens_when_lost",
            type=int,
            default=0,
            metavar="TOKENS",
            help="Fallback prefill: the largest number of new tokens that this decode server "
            "computes itself if the prefill server of a request is lost or cannot be reached, or "
            "its transfer failed. Default: 0, the request fails.",
        )
        group.add_argument(
            compat.LOCAL_SHARE,
            "--disaggregation-decode-local-share",
            dest="disaggregation_decode_local_share",
            type=float,
            default=0.5,
            metavar="RATIO",
            help=(
                "The share of the time that local prefill may take while requests run, above 0 "
                "and at most 1. A decode step follows each chunk in any case. Default: 0.5."
            ),
        )
        group.add_argument(
            compat.LOCAL_MAX_ITL,
            type=float,
            default=0.0,
            metavar="MS",
            help="A bound on the inter-token latency of running requests, in milliseconds: chunks "
            "of local prefill are sized so that 99 of 100 gaps between tokens with a chunk in them "
            "are shorter. Turns that do not fit are left to prefill. Needs "
            f"{compat.LOCAL}. Default: 0, no bound.",
        )
        compat_buffer_only.add_arguments(group)


def _upstream() -> type[_Base]:
    """What comes after the mixin: a static method has no ``super()``."""
    from sglang.srt import server_args

    order = server_args.ServerArgs.__mro__
    return order[order.index(DisaggArgs) + 1]
