"""The flags of the patch set, as a mixin for SGLang's ``ServerArgs``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any  # Any: an object with the attributes of ServerArgs

from typing_extensions import override

from sglang.srt.patchset import conditions, environment, flags, refusals, staging_size
from sglang.srt.patchset.flags import LOCAL, LOCAL_MAX_ITL, MODE, ON, PAGES, SIZE
from sglang.srt.patchset.status import closure, examine, require_active

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs as _Base
else:
    _Base = object

#: SGLang's default, if --hicache-storage-backend-extra-config has no prefetch_threshold.
PREFETCH_THRESHOLD = 256


@dataclasses.dataclass
class DisaggArgs(_Base):
    """Adds the flags. Without any of them every method is stock, except that FP4 KV, which SGLang
    transfers wrongly, is refused on both servers of a pair."""

    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_local_tokens: int = 0
    disaggregation_decode_fallback_prefill_tokens: int = 0
    disaggregation_decode_local_prefill_time_ratio: float = 0.5
    disaggregation_decode_local_max_itl_ms: float = 0.0
    hicache_host_memory_mode: str = "cache"
    hicache_buffer_pages: int | None = None

    @override
    def __post_init__(self) -> None:
        if wrong := environment.wrong():
            raise ValueError(wrong)
        if self.disaggregation_mode != "null":
            # Examined here, so that a reason to stay stock is logged once and not per process.
            examine(closure(flags.backend_group(self)))
        # Checked before SGLang, because disable_radix_cache is still the user's value, and because
        # SGLang skips the rest for some model paths ("dummy").
        check_numbers(self)
        refusals.check_given(self)
        for flag, groups in flags.needed_groups(self).items():
            require_active(flag, *groups)
        super().__post_init__()
        # Again on the values that SGLang has filled in or changed.
        refusals.check_filled_in(self)
        check_pages(self)
        flags.attend_prefixes_whole(self)

    @override
    def _handle_model_specific_adjustments(self) -> None:
        # The first handler that can read the model's configuration.
        if flags.needed_groups(self):
            refusals.check_model(self, self.get_model_config())
        super()._handle_model_specific_adjustments()
        if flags.wants_radix_cache(self) and conditions.has_state_layers(self.get_model_config()):
            # SGLang turns the tree off for models for which it has no tree with states; decode's
            # tree needs none. No overlap, because the step in flight would advance the state of a
            # retracted request one token beyond its text.
            self.disable_radix_cache, self.disable_overlap_schedule = False, True

    @override
    def _handle_pd_disaggregation(self) -> None:
        # Skipped, because for a decode server SGLang only turns the tree off here (and checks the
        # staging buffer, which is refused with the flag).
        if not self.disaggregation_decode_enable_radix_cache:
            super()._handle_pd_disaggregation()

    @staticmethod
    @override
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        from sglang.srt.server_args import ServerArgs

        # The class after the mixin, because a static method has no ``super()``.
        order = ServerArgs.__mro__
        order[order.index(DisaggArgs) + 1].add_cli_args(parser)
        group = parser.add_argument_group("sglang-disagg-patchset")
        group.add_argument(
            flags.FLAG,
            action="store_true",
            help="Decode server only: keep the KV of finished requests in a radix tree. The "
            "prefill server then sends only the pages that the tree does not hold. Needs "
            f"--disaggregation-transfer-backend {' or '.join(flags.DELTA_BACKENDS)}.",
        )
        group.add_argument(
            LOCAL,
            type=int,
            default=0,
            metavar="TOKENS",
            help="Local prefill: the largest number of new tokens of a turn that this decode "
            "server computes itself. Needs the decode radix cache. Default: 0, never.",
        )
        group.add_argument(
            flags.LOCAL_WHEN_LOST,
            type=int,
            default=0,
            metavar="TOKENS",
            help="Fallback prefill: the largest number of new tokens that this decode server "
            "computes itself if the prefill server of a request is lost or cannot be reached, or "
            "its transfer failed. Default: 0, the request fails.",
        )
        group.add_argument(
            flags.LOCAL_TIME_RATIO,
            type=float,
            default=0.5,
            metavar="RATIO",
            help=(
                "Share of the time that local prefill may take while requests run, above 0 and at "
                "most 1. A decode step follows each chunk in any case. Default: 0.5."
            ),
        )
        group.add_argument(
            LOCAL_MAX_ITL,
            type=float,
            default=0.0,
            metavar="MS",
            help="A bound on the inter-token latency of running requests, in milliseconds: chunks "
            "of local prefill are sized so that 99 of 100 gaps between tokens with a chunk in them "
            "are shorter. Turns that do not fit are left to prefill. Needs "
            f"{LOCAL} or {flags.LOCAL_WHEN_LOST}. Default: 0, no bound.",
        )
        group.add_argument(
            MODE,
            choices=flags.MODES,
            default="cache",
            help="Use of HiCache's host memory: 'cache' keeps evicted KV (SGLang's behaviour), "
            "'buffer_only' is a small staging buffer between the device and "
            "--hicache-storage-backend.",
        )
        group.add_argument(
            PAGES,
            type=int,
            default=None,
            help=f"Size of the staging buffer of {ON}, in pages of --page-size tokens. Default: "
            f"what {SIZE} holds; else {flags.RATIO} times the device pool, if that flag is "
            f"not SGLang's own {flags.CACHE_RATIO:g}; else 5 GB, at most the device pool's "
            "pages.",
        )


def check_numbers(args: Any) -> None:
    """Raise ``ValueError`` for invalid values of our flags."""
    local = args.disaggregation_decode_local_tokens
    lost = args.disaggregation_decode_fallback_prefill_tokens
    share = args.disaggregation_decode_local_prefill_time_ratio
    bound = args.disaggregation_decode_local_max_itl_ms
    mode, pages, size = args.hicache_host_memory_mode, args.hicache_buffer_pages, args.hicache_size
    tokens, is_on = "must be 0 (off) or a number of tokens, not", flags.wants_buffer_only(args)
    for is_wrong, text in (
        (local < 0, f"{LOCAL} {tokens} {local}."),
        (lost < 0, f"{flags.LOCAL_WHEN_LOST} {tokens} {lost}."),
        (
            not 0 < share <= 1,
            f"{flags.LOCAL_TIME_RATIO} must be above 0 and at most 1, not {share}.",
        ),
        (
            not 0 <= bound < math.inf,
            f"{LOCAL_MAX_ITL} must be 0 (no bound) or a number of ms, not {bound}.",
        ),
        (
            bound and not (local or lost),
            f"{LOCAL_MAX_ITL} bounds local prefill, and this server does none. "
            f"Add {LOCAL} to it, or remove {LOCAL_MAX_ITL}.",
        ),
        (mode not in flags.MODES, f"{MODE} {mode} is not known. Use {' or '.join(flags.MODES)}."),
        (
            pages is not None and not is_on,
            f"{PAGES} {pages} sizes the staging buffer of {ON}, but {MODE} is {mode}. Add {ON}, "
            f"or remove {PAGES}.",
        ),
        (
            pages is not None and pages <= 0,
            f"{PAGES} {pages} must be positive. Remove {PAGES} to have it computed.",
        ),
        (is_on and size < 0, f"{SIZE} {size} must be positive. Remove {SIZE}, or use {PAGES}."),
        (
            is_on and pages is not None and size > 0,
            f"{PAGES} {pages} and {SIZE} {size} both size the staging buffer of {ON}: one in "
            "pages, one in gigabytes per rank. Remove one of them.",
        ),
    ):
        if is_wrong:
            raise ValueError(text)


def check_pages(args: Any) -> None:
    """Raise ``ValueError`` for a staging buffer that is too small, if its size is given in pages.
    Other sizes are checked once the bytes of a page are known."""
    pages, page_size = args.hicache_buffer_pages, args.page_size
    if flags.wants_buffer_only(args) and pages is not None and page_size is not None:
        threshold = prefetch_threshold(args.hicache_storage_backend_extra_config)
        staging_size.check_staging_pages(pages, page_size, threshold)


def prefetch_threshold(extra_config: str | None) -> int:
    """Return the tokens of the smallest hit that is fetched, from the JSON of the backend's
    configuration.

    For a configuration in a file ("@path") return the default; the cache, which reads the file,
    checks the size again.
    """
    if not extra_config or extra_config.startswith("@"):
        return PREFETCH_THRESHOLD
    try:
        value = json.loads(extra_config).get("prefetch_threshold", PREFETCH_THRESHOLD)
    except (ValueError, AttributeError):
        return PREFETCH_THRESHOLD  # SGLang reports the error
    return value if isinstance(value, int) else PREFETCH_THRESHOLD
