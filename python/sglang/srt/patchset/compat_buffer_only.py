"""What ``--hicache-host-memory-mode buffer_only`` can be combined with, and its default size.

Checks on anything that has the attributes of ``ServerArgs`` or ``ModelConfig``. As in ``compat``,
every refusal names both settings and a way out, before any memory is touched.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any  # Any: what has attributes of ServerArgs, ModelConfig, or adds flags

from sglang.srt.mem_cache.buffer_only import settings
from sglang.srt.patchset.compat import special_layers
from sglang.srt.patchset.environment import sglang_switch

logger = logging.getLogger(__name__)

MODE = "--hicache-host-memory-mode"
PAGES = settings.PAGES_FLAG
SIZE = settings.SIZE_FLAG
MODES = ("cache", "buffer_only")
ON = f"{MODE} buffer_only"
#: The feature group (``patchset/table.py``) that the mode is in.
GROUP = "buffer_only"
#: SGLang's, where --hicache-storage-backend-extra-config has no prefetch_threshold.
PREFETCH_THRESHOLD = 256

#: Storage backends that the mode is tested with; ``dynamic`` is a class of one's own.
BACKENDS = ("mooncake", "file", "dynamic")

#: (attribute, how the user wrote it, why not).
_EXCLUSIVE: tuple[tuple[str, str, str], ...] = (
    ("disable_radix_cache", "--disable-radix-cache", "without a radix tree no KV is shared"),
    ("enable_lmcache", "--enable-lmcache", "it has its own tree and host tier"),
    ("enable_hisparse", "--enable-hisparse", "it keeps a part of a request's KV on the host"),
    (
        "enable_streaming_session",
        "--enable-streaming-session",
        "it wraps the tree and keeps pages itself",
    ),
    ("dllm_algorithm", "--dllm-algorithm", "its scheduler loop does not call the store"),
    (
        "enable_pdmux",
        "--enable-pdmux",
        "its prefills do not wait for loads from the store",
    ),
)


def wanted(args: Any) -> bool:
    """Whether the mode is on."""
    return bool(args.hicache_host_memory_mode == "buffer_only")


def add_arguments(group: Any) -> None:
    """The flags of the mode."""
    group.add_argument(
        MODE,
        choices=MODES,
        default="cache",
        help="What HiCache's host memory is: 'cache' keeps evicted KV (SGLang's behaviour), "
        "'buffer_only' is a small staging buffer between the device and "
        "--hicache-storage-backend.",
    )
    group.add_argument(
        PAGES,
        type=int,
        default=None,
        help=f"Size of the staging buffer of {ON}, in pages of --page-size tokens. Default: what "
        f"{SIZE} holds; else {settings.RATIO_FLAG} times the device pool, if that flag is not "
        f"SGLang's own {settings.CACHE_RATIO:g}; else 5 GB, at most the device pool's pages.",
    )


def check_given(args: Any) -> None:
    """Raise ``ValueError`` at the first setting, as the user gave it, that does not fit."""
    for problem in _problems(args):
        raise ValueError(problem)


def complete(args: Any) -> None:
    """After SGLang has filled in the rest: check once more, and the size where it is in pages; one
    that was not given is chosen when the bytes of a page are known."""
    if not args.enable_hierarchical_cache:
        raise ValueError(
            f"{ON} was given, but SGLang turned --enable-hierarchical-cache off for these "
            f"arguments (its log says why). Change them, or remove {MODE}."
        )
    check_given(args)
    if args.hicache_storage_prefetch_policy == "best_effort":
        logger.warning(
            "%s with --hicache-storage-prefetch-policy best_effort: a request uses only the pages "
            "that arrived before it is scheduled, often none. Use wait_complete or timeout.",
            ON,
        )
    if args.speculative_algorithm:
        logger.warning(
            "%s with --speculative-algorithm: the store has no draft KV. After a prefix is loaded "
            "from it, the draft KV does not match the text, also on a decode server that receives "
            "it. Outputs are the same; fewer drafts are accepted.",
            ON,
        )
    if args.page_size is None or args.hicache_buffer_pages is None:
        return
    threshold = prefetch_threshold(args.hicache_storage_backend_extra_config)
    settings.check_pages(args.hicache_buffer_pages, args.page_size, threshold)


def check_model(config: Any) -> None:
    """Raise ``ValueError`` for a model whose KV is not one pool of pages."""
    kind = special_layers(config)
    if kind:
        raise ValueError(
            f"{ON} does not support {kind}, given with --model-path "
            f"{getattr(config, 'model_path', '')}. Use {MODE} cache, or remove "
            "--enable-hierarchical-cache."
        )


def prefetch_threshold(extra_config: str | None) -> int:
    """Tokens of the smallest hit that is fetched, from the JSON of the backend's configuration.

    A configuration in a file ("@path") is read by SGLang when it builds the cache, which then
    checks the size again; until then the default counts.
    """
    if not extra_config or extra_config.startswith("@"):
        return PREFETCH_THRESHOLD
    try:
        value = json.loads(extra_config).get("prefetch_threshold", PREFETCH_THRESHOLD)
    except (ValueError, AttributeError):
        return PREFETCH_THRESHOLD  # SGLang reports what is wrong with it
    return value if isinstance(value, int) else PREFETCH_THRESHOLD


def _problems(args: Any) -> Iterator[str]:
    mode, pages = args.hicache_host_memory_mode, args.hicache_buffer_pages
    if mode not in MODES:
        yield f"{MODE} {mode} is not known. Use {' or '.join(MODES)}."
    if pages is not None and mode != "buffer_only":
        yield (
            f"{PAGES} {pages} sizes the staging buffer of {ON}, but {MODE} is {mode}. Add {ON}, "
            f"or remove {PAGES}."
        )
    if pages is not None and pages <= 0:
        yield f"{PAGES} {pages} must be positive. Remove {PAGES} to have it computed."
    if mode != "buffer_only":
        return
    if args.hicache_size < 0:
        yield f"{SIZE} {args.hicache_size} must be positive. Remove {SIZE}, or use {PAGES}."
    if pages is not None and args.hicache_size > 0:
        yield (
            f"{PAGES} {pages} and {SIZE} {args.hicache_size} both size the staging buffer of "
            f"{ON}: one in pages, one in gigabytes per rank. Remove one of them."
        )
    if args.disaggregation_mode == "decode":
        yield (
            f"{ON} is for prefill and aggregated servers, but --disaggregation-mode is decode, "
            f"whose scheduler does not run HiCache. Remove {MODE} on the decode server."
        )
    if not args.enable_hierarchical_cache:
        yield f"{ON} is a mode of --enable-hierarchical-cache. Add it, or remove {MODE}."
    if args.hicache_storage_backend is None:
        yield (
            f"{ON} stores KV in a storage backend, but --hicache-storage-backend is not given. "
            f"Add --hicache-storage-backend, or use {MODE} cache."
        )
    elif args.hicache_storage_backend not in BACKENDS:
        yield (
            f"{ON} does not support --hicache-storage-backend {args.hicache_storage_backend}: "
            f"this package was not tested with it. Use one of {', '.join(BACKENDS)}, or {MODE} "
            "cache."
        )
    if args.hicache_write_policy == "write_back":
        yield (
            f"{ON} writes KV to the store while it is on the device; --hicache-write-policy "
            "write_back writes it only on eviction. Use --hicache-write-policy write_through or "
            "write_through_selective."
        )
    for attribute, written, why in _EXCLUSIVE:
        if getattr(args, attribute, None):
            yield f"{ON} cannot be combined with {written}: {why}. Remove one of them."
    if args.kv_cache_dtype == "fp4_e2m1":
        yield (
            f"{ON} cannot be combined with --kv-cache-dtype fp4_e2m1: SGLang's host pools support "
            "neither its layout nor its scales. Use --kv-cache-dtype auto or fp8_e4m3, or remove "
            "--enable-hierarchical-cache."
        )
    if sglang_switch("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"):
        yield (
            f"{ON} cannot be combined with SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1: it replaces the "
            "radix tree. Remove one of them."
        )
    for attribute, written in (
        ("pp_size", "--pipeline-parallel-size"),
        ("attn_cp_size", "--attention-context-parallel-size"),
    ):
        if getattr(args, attribute, 1) > 1:
            yield (
                f"{ON} cannot be combined with {written} above 1: its ranks would fetch different "
                f"lengths of a prefix. Use {written} 1, or {MODE} cache."
            )
