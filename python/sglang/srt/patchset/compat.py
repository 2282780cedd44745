"""What ``--disaggregation-decode-enable-radix-cache`` can be combined with, and what no pair can.

Pure checks on anything that has the attributes of ``ServerArgs`` or ``ModelConfig``. Every refusal
names both settings and a way out, and comes before any memory or weights are touched: the same
conflict found later would end a running server at its first request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any  # Any: what has the attributes of ServerArgs, ModelConfig

from sglang.srt.patchset import environment
from sglang.srt.patchset.environment import sglang_switch

logger = logging.getLogger(__name__)

FLAG = "--disaggregation-decode-enable-radix-cache"
LOCAL = "--disaggregation-decode-local-tokens"
LOCAL_WHEN_LOST = "--disaggregation-decode-fallback-prefill-tokens"
LOCAL_SHARE = "--disaggregation-decode-local-prefill-time-ratio"
LOCAL_MAX_ITL = "--disaggregation-decode-local-max-itl-ms"

#: Transfer backends whose sender and receiver of ours move only the missing pages, each with the
#: feature group (``patchset/table.py``) that they are in.
DELTA_BACKENDS: dict[str, str] = {"nixl": "nixl_async", "mooncake": "mooncake_delta"}

#: Other settings that own or shape the KV pool in a way that the decode tree does not follow:
#: (attribute, how the user wrote it, why not).
_EXCLUSIVE: tuple[tuple[str, str, str], ...] = (
    (
        "enable_hisparse",
        "--enable-hisparse",
        "it keeps only a part of a request's KV in the device pool",
    ),
    (
        "disaggregation_decode_enable_offload_kvcache",
        "--disaggregation-decode-enable-offload-kvcache",
        "it frees the pages of finished requests, which the radix cache keeps",
    ),
    (
        "enable_hierarchical_cache",
        "--enable-hierarchical-cache",
        "a decode server does not run its copies to the host",
    ),
    ("enable_lmcache", "--enable-lmcache", "it has its own tree"),
    (
        "enable_streaming_session",
        "--enable-streaming-session",
        "it wraps the tree and keeps pages itself",
    ),
)
_EXCLUSIVE_ENV: tuple[tuple[str, str], ...] = (
    ("SGLANG_DISAGG_STAGING_BUFFER", "it always receives whole prompts"),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "it replaces the radix tree"),
)


#: Speculation whose draft model has KV with the target's page indices. SGLang reads NEXTN as EAGLE.
_DRAFTING = ("EAGLE", "EAGLE3", "NEXTN")
#: With spec v2. SGLang's rows are the context, 4 tokens and one step long; a request ends 4 tokens
#: before the context does, and holds slots of two steps ahead of its text.
_MOST_DRAFTS_V2 = 8
#: Why the others are refused.
_NOT_DRAFTING = {
    "STANDALONE": (
        "SGLang's decode server does not initialise such a draft model after a transfer, and its "
        "metadata buffers are smaller than those of prefill"
    ),
    "NGRAM": "SGLang's decode server does not draft from n-grams after a transfer",
}


def groups(args: Any) -> tuple[str, ...]:
    """The feature groups that the flag needs with these arguments, which were checked before."""
    return ("decode_radix", *backend_groups(args))


def backend_groups(args: Any) -> tuple[str, ...]:
    """The feature group of the transfer backend; none for those that are SGLang's own."""
    group = DELTA_BACKENDS.get(args.disaggregation_transfer_backend)
    return () if group is None else (group,)


def check_decode_radix_args(args: Any) -> None:
    """Raise ``ValueError`` at the first setting that the flag cannot be combined with."""
    for problem in _problems(args):
        raise ValueError(problem)


def check_transferable(args: Any) -> None:
    """Raise ``ValueError`` for KV that SGLang's prefill and decode servers do not transfer whole,
    on either side, with or without the flag: each answer would be wrong."""
    mode, backend = args.disaggregation_mode, args.disaggregation_transfer_backend
    if mode != "null" and backend in DELTA_BACKENDS and args.kv_cache_dtype == "fp4_e2m1":
        raise ValueError(
            f"--kv-cache-dtype fp4_e2m1 cannot be combined with --disaggregation-mode {mode}: "
            "SGLang transfers such KV without its scales. With multi-head attention, the transfer "
            "even writes outside the pool. Use --kv-cache-dtype auto or fp8_e4m3 on both servers."
        )


def check_explicit_disable(args: Any) -> None:
    """Refuse ``--disable-radix-cache``; only meaningful before SGLang has set it by itself."""
    if args.disable_radix_cache:
        raise ValueError(
            _conflict("--disable-radix-cache", "one turns on what the other turns off")
        )


def check_still_enabled(args: Any) -> None:
    """SGLang turns the tree off for some models and backends: do not run on without it silently."""
    if args.disable_radix_cache:
        raise ValueError(
            f"{FLAG} was given, but SGLang set --disable-radix-cache for this model or attention "
            f"backend (its log says why). Choose another, or remove {FLAG}."
        )


def warn_dp_attention(args: Any) -> None:
    """Data parallel attention works, but it needs a router that knows prefixes to be worth it."""
    if args.enable_dp_attention:
        logger.warning(
            "%s with --enable-dp-attention: every data parallel rank has its own tree. Requests "
            "hit only if the router sends those with the same prefix to the same rank "
            "(prefix-aware routing).",
            FLAG,
        )


def warn_drafts_behind_hicache(args: Any) -> None:
    """SGLang's own HiCache on a prefill server: nothing but the accept rate would show it."""
    if (
        args.disaggregation_mode == "prefill"
        and args.enable_hierarchical_cache
        and args.speculative_algorithm
    ):
        logger.warning(
            "--enable-hierarchical-cache with --speculative-algorithm: the host and the store "
            "have no draft KV. After a prefix is loaded from them, decode servers receive draft "
            "KV that does not match the text. Outputs are the same; fewer drafts are accepted.",
        )


def check_decode_radix_model(config: Any, algorithm: str | None = None) -> None:
    """Raise ``ValueError`` for a model whose KV is not one plain pool of pages; ``algorithm``: the
    speculation that is to run with it."""
    kind = _unsupported_kind(config)
    if kind:
        raise ValueError(
            f"{FLAG} does not support {kind}, given with --model-path "
            f"{getattr(config, 'model_path', '')}. Remove {FLAG} to serve it."
        )
    if algorithm is not None and _has_sparse_index(config):
        raise ValueError(
            f"{FLAG} cannot be combined with --speculative-algorithm {algorithm} for a model with "
            "sparse attention (DSA): SGLang transfers the target's index only, so the draft model "
            "would use the index of another text. Remove one of them."
        )


def wanted(args: Any) -> bool:
    """Whether the flag is on."""
    return bool(args.disaggregation_decode_enable_radix_cache)


def checks_invariants(args: Any) -> bool:
    """Whether an idle server looks what it has left behind."""
    return environment.CHECK_INVARIANTS.read()


def computes_turns(args: Any) -> bool:
    """Whether a server with these arguments computes turns itself, be it where prefill is lost."""
    tokens = (
        args.disaggregation_decode_local_tokens,
        args.disaggregation_decode_local_tokens_when_lost,
    )
    return args.disaggregation_mode == "decode" and any(tokens)


#: Attention of latent KV that on a decode server lacks what SGLang's chunked prefix cache calls
#: (``FlashInferMLAAttnBackend.enable_chunk_kv``, and what inherits it).
_NO_PREFIX_CHUNKS = {"flashinfer", "flashmla", "cutlass_mla", "trtllm_mla"}


def attend_prefixes_whole(args: Any) -> None:
    """Turn SGLang's chunked prefix cache off where a local chunk behind a prefix would end the
    server: its decode servers never run a prompt, and prepare nothing for one."""
    extends = {args.get_attention_backends()[0], args.speculative_draft_attention_backend}
    if computes_turns(args) and extends & _NO_PREFIX_CHUNKS:
        args.disable_chunked_prefix_cache = True


def check_local_turns(args: Any) -> None:
    """Raise ``ValueError`` where a decode server with these arguments cannot compute turns itself.

    What cannot be computed there of a single request (input logprobs, images) is left to prefill.
    """
    given = {
        LOCAL: args.disaggregation_decode_local_tokens,
        LOCAL_WHEN_LOST: args.disaggregation_decode_local_tokens_when_lost,
    }
    for name, tokens in given.items():
        if tokens < 0:
            raise ValueError(f"{name} must be 0 (off) or a number of tokens, not {tokens}.")
    share = args.disaggregation_decode_local_share
    if not 0 < share <= 1:
        raise ValueError(f"{LOCAL_SHARE} must be above 0 and at most 1, not {share}.")
    bound = args.disaggregation_decode_local_max_itl_ms
    if not 0 <= bound < math.inf:
        raise ValueError(f"{LOCAL_MAX_ITL} must be 0 (no bound) or a number of ms, not {bound}.")
    flag = next((flag for flag, tokens in given.items() if tokens), None)
    if flag is None:
        if bound:
            raise ValueError(
                f"{LOCAL_MAX_ITL} bounds local prefill, and this server does none. "
                f"Add {LOCAL} to it, or remove {LOCAL_MAX_ITL}."
            )
        return
    if not args.disaggregation_decode_enable_radix_cache:
        raise ValueError(
            f"{flag} needs {FLAG}: without the cache a decode server has no KV of earlier turns "
            f"and would compute the whole session each turn. Add {FLAG} to the decode server, or "
            f"remove {flag}."
        )
    for written, holds, why in (
        (
            "--enable-dp-attention",
            args.enable_dp_attention,
            "all data parallel ranks run the same kind of step, so one rank's prompt would stop "
            "the decode steps of the others",
        ),
        (
            "--deepep-mode low_latency",
            args.moe_a2a_backend != "none" and args.deepep_mode == "low_latency",
            "its buffers are made for decode steps, and a chunk of a prompt does not fit",
        ),
        (
            "--enable-two-batch-overlap",
            args.enable_two_batch_overlap,
            "it splits decode steps, and a chunk of a prompt is not split in the same way",
        ),
        (
            "--enable-pdmux",
            args.enable_pdmux,
            "it has its own scheduler loop",
        ),
        (
            "--enable-lora-overlap-loading",
            bool(getattr(args, "enable_lora_overlap_loading", False)),
            "a chunk may need an adapter that is not loaded yet",
        ),
    ):
        if holds:
            raise ValueError(
                f"{flag} cannot be combined with {written}: {why}. Remove one of them."
            )


def _problems(args: Any) -> Iterator[str]:
    mode, backend = args.disaggregation_mode, args.disaggregation_transfer_backend
    if mode != "decode":
        yield (
            f"{FLAG} is for decode servers, but --disaggregation-mode is {mode}. "
            f"Give it to the decode server only; a prefill server needs no flag to take part."
        )
    if backend not in DELTA_BACKENDS:
        yield (
            f"{FLAG} needs a transfer backend that can send a part of a prompt, and "
            f"--disaggregation-transfer-backend {backend} cannot. "
            f"Use --disaggregation-transfer-backend {' or '.join(DELTA_BACKENDS)}."
        )
    for attribute, written, why in _EXCLUSIVE:
        if getattr(args, attribute):
            yield _conflict(written, why)
    for name, why in _EXCLUSIVE_ENV:
        if sglang_switch(name):
            yield _conflict(f"{name}=1", why)
    yield from _speculation_problems(args)
    if args.pp_size > 1:
        yield _conflict(
            "--pipeline-parallel-size above 1",
            "the stages would each match their own tree, without agreeing on a length",
        )
    reserved, page_size = args.num_reserved_decode_tokens, args.page_size
    if page_size is not None and reserved < page_size:
        yield (
            f"{FLAG} needs --num-reserved-decode-tokens ({reserved}) to be at least "
            f"--page-size ({page_size}), or the admission budget ignores the rounding to pages. "
            f"Use --num-reserved-decode-tokens {page_size} or more."
        )


def _speculation_problems(args: Any) -> Iterator[str]:
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return
    if algorithm not in _DRAFTING:
        why = _NOT_DRAFTING.get(
            algorithm, "what its draft model needs to be transferred is unknown"
        )
        yield _conflict(f"--speculative-algorithm {algorithm}", why)
    # Before SGLang has filled in what the user left out, it is None.
    if (args.speculative_eagle_topk or 1) > 1:
        yield _conflict(
            f"--speculative-eagle-topk {args.speculative_eagle_topk} (SGLang's own choice for some "
            "models where none is given)",
            "a tree of drafts takes more slots than admission counts, and moves KV between them "
            "when one is accepted; use --speculative-eagle-topk 1",
        )
    if args.enable_multi_layer_eagle:
        yield _conflict(
            "--enable-multi-layer-eagle",
            "each of its layers has a KV pool of its own, and SGLang transfers the first only",
        )
    drafts = getattr(args, "speculative_num_draft_tokens", None) or 0
    if drafts > _MOST_DRAFTS_V2 and sglang_switch("SGLANG_ENABLE_SPEC_V2"):
        yield _conflict(
            f"SGLANG_ENABLE_SPEC_V2=1 with {drafts} draft tokens",
            "near the context length a request holds slots of two steps ahead of its text, and "
            "SGLang's rows have room for one step and 4 tokens, so it would write into the "
            f"next row; use --speculative-num-steps {_MOST_DRAFTS_V2 - 1} at most",
        )


def special_layers(config: Any) -> str:
    """Layers whose state is not in one pool of pages; empty where there are none."""
    if getattr(config, "is_hybrid_swa", False):
        return "models with a separate pool for sliding-window layers"
    if any(_has_state_layers(c) for c in _hf_configs(config)):
        return "models with state-space or linear-attention layers"
    return ""


def _unsupported_kind(config: Any) -> str:
    """What is special about the model's KV; empty for multi-head and latent attention, the latter
    also with a sparse index, whose pages are the KV's."""
    special = special_layers(config)
    if special:
        return special
    if getattr(config, "is_multimodal", False) and _on_transformers(config):
        return "multimodal models with --model-impl transformers (SGLang turns their tree off)"
    return ""


def _has_sparse_index(config: Any) -> bool:
    return any(getattr(c, "index_topk", None) is not None for c in _hf_configs(config))


def _hf_configs(config: Any) -> list[Any]:
    found = (getattr(config, "hf_config", None), getattr(config, "hf_text_config", None))
    return [each for each in found if each is not None]


def _has_state_layers(hf_config: Any) -> bool:
    # All configurations of such models offer this; look at the class, the value is computed.
    return hasattr(type(hf_config), "mamba2_cache_params")


def _on_transformers(config: Any) -> bool:
    chosen = getattr(config, "model_impl", None)
    return str(getattr(chosen, "value", chosen)) == "transformers"


def _conflict(other: str, why: str) -> str:
    return f"{FLAG} cannot be combined with {other}: {why}. Remove one of them."
