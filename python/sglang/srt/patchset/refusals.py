"""Settings that are refused with our flags, before memory or weights are loaded: found later, the
conflict would end the server at its first request.

A refusal is a row: our flag, the refused setting, and the reason. To add one, add a row to
``ALWAYS``, as ``RefusedSetting(RADIX, "--enable-x", "it has its own tree")``, and one to the test;
``python -m benchmark.tables`` then prints it into README and docs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any  # Any: an object with the attributes of ServerArgs or ModelConfig

from sglang.srt.patchset import conditions
from sglang.srt.patchset.flags import (
    DELTA_BACKENDS,
    FLAG,
    LOCAL,
    LOCAL_WHEN_LOST,
    MODE,
    NO_WINDOW_POOL,
    OFFLOAD,
    ON,
    is_given,
)

logger = logging.getLogger(__name__)

#: Storage backends that the staging buffer is tested with; ``dynamic`` loads a user's class.
STORES = ("mooncake", "file", "dynamic")
#: Speculative algorithms whose draft KV has the target's page indices. SGLang reads NEXTN as EAGLE.
DRAFTING = ("EAGLE", "EAGLE3", "NEXTN")
#: Maximum draft tokens with spec v2. SGLang's rows hold the context, 4 tokens and one step; a
#: request ends 4 tokens before the context and holds slots of two steps beyond its text.
MAX_DRAFTS_V2 = 8


@dataclass(frozen=True)
class RefusedSetting:
    """One setting that is refused with a flag of ours."""

    #: Any of these flags, as on a command line.
    flags: tuple[str, ...]
    #: The refused setting in a user's notation (``flags.is_given``), and the reason.
    other: str
    why: str
    #: The error text, if not the default one; ``{flag}`` and ``{attribute}`` are filled in.
    text: str = ""
    #: The condition, if ``flags.is_given`` cannot read it in ``other``: in that notation, or a
    #: function of the arguments or of the model's configuration.
    when: str | Callable[[Any], bool] = ""
    #: The advice to the user.
    instead: str = "Remove one of them."


# ---- the rows ----

# Values of ``RefusedSetting.flags``.
RADIX = (FLAG,)
TURNS = (LOCAL, LOCAL_WHEN_LOST)
BUFFER = (ON,)
FP4 = ("--kv-cache-dtype fp4_e2m1",)
HICACHE = ("--enable-hierarchical-cache",)
# Lists in texts.
_BACKENDS = ", ".join(DELTA_BACKENDS)
_DRAFTS = ", ".join(DRAFTING)
_STORES = ", ".join(STORES)

#: Refused as the user gave them, and again after SGLang has filled in the rest.
ALWAYS: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        RADIX,
        "another --disaggregation-mode than decode",
        "a prefill server needs no flag to take part",
        "{flag} is for decode servers, but --disaggregation-mode is {disaggregation_mode}. Give it "
        "to the decode server only; a prefill server needs no flag to take part.",
    ),
    RefusedSetting(
        RADIX,
        f"another --disaggregation-transfer-backend than {_BACKENDS}",
        "it cannot send a part of a prompt",
        "{flag} needs a transfer backend that can send a part of a prompt, and "
        "--disaggregation-transfer-backend {disaggregation_transfer_backend} cannot. Use "
        f"one of {_BACKENDS}.",
    ),
    RefusedSetting(
        RADIX, "--enable-hisparse", "it keeps only a part of a request's KV in the device pool"
    ),
    RefusedSetting(
        RADIX,
        f"{OFFLOAD} without {ON}",
        "SGLang's offload frees the pages of finished requests, which the radix cache keeps",
        instead=f"Add {ON}: decode then writes its KV to the store and keeps it in the radix "
        f"cache. Or remove {OFFLOAD}.",
    ),
    RefusedSetting(
        RADIX, "--enable-hierarchical-cache", "a decode server does not run its copies to the host"
    ),
    RefusedSetting(RADIX, "--enable-lmcache", "it has its own tree"),
    RefusedSetting(
        RADIX + BUFFER, "--enable-streaming-session", "it wraps the tree and keeps pages itself"
    ),
    RefusedSetting(RADIX, "SGLANG_DISAGG_STAGING_BUFFER=1", "it always receives whole prompts"),
    RefusedSetting(
        RADIX + BUFFER, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1", "it replaces the radix tree"
    ),
    RefusedSetting(
        RADIX,
        "--speculative-algorithm STANDALONE",
        "SGLang's decode server does not initialise such a draft model after a transfer, and its "
        "metadata buffers are smaller than those of prefill",
    ),
    RefusedSetting(
        RADIX,
        "--speculative-algorithm NGRAM",
        "SGLang's decode server does not draft from n-grams after a transfer",
    ),
    RefusedSetting(
        RADIX,
        f"another --speculative-algorithm than {_DRAFTS}",
        "what its draft model needs to be transferred is unknown",
        "{flag} cannot be combined with --speculative-algorithm {speculative_algorithm}: what its "
        "draft model needs to be transferred is unknown. Remove one of them.",
    ),
    RefusedSetting(
        RADIX,
        "--speculative-eagle-topk above 1",
        "a tree of drafts takes more slots than admission counts; SGLang chooses it itself for "
        "Llama and Grok models, so give 1",
        "{flag} cannot be combined with --speculative-eagle-topk {speculative_eagle_topk} "
        "(SGLang's own choice for some models where none is given): a tree of drafts takes more "
        "slots than admission counts; use --speculative-eagle-topk 1. Remove one of them.",
    ),
    RefusedSetting(
        RADIX,
        "--enable-multi-layer-eagle",
        "each of its layers has a KV pool of its own, and SGLang transfers the first only",
    ),
    RefusedSetting(
        RADIX,
        f"SGLANG_ENABLE_SPEC_V2=1 with --speculative-num-draft-tokens above {MAX_DRAFTS_V2}",
        "SGLang's rows of slots are too short for them",
        instead=f"Use --speculative-num-steps {MAX_DRAFTS_V2 - 1} at most.",
    ),
    RefusedSetting(
        RADIX,
        "--mamba-scheduler-strategy extra_buffer",
        "it keeps states for a tree with states, and decode's tree has none",
    ),
    RefusedSetting(
        RADIX,
        "--pipeline-parallel-size above 1",
        "the stages would each match their own tree, without agreeing on a length",
    ),
    RefusedSetting(
        RADIX,
        "--num-reserved-decode-tokens below --page-size",
        "the admission budget ignores the rounding to pages",
        "{flag} needs --num-reserved-decode-tokens ({num_reserved_decode_tokens}) to be at least "
        "--page-size ({page_size}), or the admission budget ignores the rounding to pages. Use "
        "--num-reserved-decode-tokens {page_size} or more.",
        when=conditions.reserves_less_than_a_page,
    ),
    RefusedSetting(
        BUFFER,
        f"--disaggregation-mode decode, without {FLAG} and {OFFLOAD}",
        "a decode server loads nothing from the store, and writes only with both",
        f"{{flag}} on a decode server needs {FLAG} and {OFFLOAD}: it loads nothing from the store, "
        f"and writes only with both. Add them, or remove {MODE} on the decode server.",
        when=conditions.writes_nothing,
    ),
    RefusedSetting(
        BUFFER,
        "--enable-lora with --disaggregation-mode decode",
        "SGLang names adapters differently on each server, so no prefill server would find what is "
        "written for them",
        instead=f"Remove {ON} and {OFFLOAD}, or --enable-lora.",
    ),
    RefusedSetting(
        BUFFER,
        "no --hicache-storage-backend",
        "that is where KV is stored",
        "{flag} stores KV in a storage backend, but --hicache-storage-backend is not given. Add "
        f"--hicache-storage-backend, or use {MODE} cache.",
    ),
    RefusedSetting(
        BUFFER,
        f"another --hicache-storage-backend than {_STORES}",
        "this package was not tested with it",
        "{flag} does not support --hicache-storage-backend {hicache_storage_backend}: this package "
        f"was not tested with it. Use one of {_STORES}, or {MODE} cache.",
    ),
    RefusedSetting(
        BUFFER,
        "--hicache-write-policy write_back",
        "it writes KV to the store only on eviction",
        "{flag} writes KV to the store while it is on the device; --hicache-write-policy "
        "write_back writes it only on eviction. Use --hicache-write-policy write_through or "
        "write_through_selective.",
    ),
    RefusedSetting(BUFFER, "--disable-radix-cache", "without a radix tree no KV is shared"),
    RefusedSetting(BUFFER, "--enable-lmcache", "it has its own tree and host tier"),
    RefusedSetting(BUFFER, "--enable-hisparse", "it keeps a part of a request's KV on the host"),
    RefusedSetting(BUFFER, "--dllm-algorithm", "its scheduler loop does not call the store"),
    RefusedSetting(BUFFER, "--enable-pdmux", "its prefills do not wait for loads from the store"),
    RefusedSetting(
        BUFFER,
        "--kv-cache-dtype fp4_e2m1",
        "SGLang's host pools support neither its layout nor its scales",
        instead="Use --kv-cache-dtype auto or fp8_e4m3, or remove --enable-hierarchical-cache.",
    ),
    RefusedSetting(
        BUFFER,
        "--pipeline-parallel-size above 1",
        "its ranks would fetch different lengths of a prefix",
        instead=f"Use --pipeline-parallel-size 1, or {MODE} cache.",
    ),
    RefusedSetting(
        BUFFER,
        "--attention-context-parallel-size above 1",
        "its ranks would fetch different lengths of a prefix",
        instead=f"Use --attention-context-parallel-size 1, or {MODE} cache.",
    ),
)

#: Refused as the user gave them only, because SGLang may set the same itself for other reasons.
AS_GIVEN: tuple[RefusedSetting, ...] = (
    # On both servers of a pair, with or without our flags, because every answer would be wrong.
    RefusedSetting(
        FP4,
        "--disaggregation-mode prefill or decode",
        "SGLang transfers such KV without its scales",
        "{flag} cannot be combined with --disaggregation-mode {disaggregation_mode}: SGLang "
        "transfers such KV without its scales. With multi-head attention, the transfer even writes "
        "outside the pool. Use --kv-cache-dtype auto or fp8_e4m3 on both servers.",
        when=conditions.is_in_a_pair,
    ),
    RefusedSetting(RADIX, "--disable-radix-cache", "one turns on what the other turns off"),
    RefusedSetting(
        TURNS,
        f"no {FLAG}",
        "a decode server without the cache has no KV of earlier turns",
        f"{{flag}} needs {FLAG}: without the cache a decode server has no KV of earlier turns and "
        f"would compute the whole session each turn. Add {FLAG} to the decode server, or remove "
        "{flag}.",
    ),
    RefusedSetting(
        TURNS,
        "--deepep-mode low_latency",
        "its buffers are made for decode steps, and a chunk of a prompt does not fit",
        instead="Use --deepep-mode auto, or remove {flag}.",
        when="--deepep-mode low_latency with another --moe-a2a-backend than none",
    ),
    RefusedSetting(
        TURNS,
        "--moe-a2a-backend mooncake or nixl",
        "SGLang runs decode steps with them, and no chunk of a prompt",
        when=conditions.dispatches_decode_steps_only,
    ),
    RefusedSetting(
        TURNS,
        "--enable-dp-attention with --speculative-algorithm",
        "a two-rank decode server with both terminated at its first requests, cause unknown",
    ),
    RefusedSetting(
        TURNS,
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1",
        "data parallel ranks then do not learn that one of them runs a chunk",
    ),
    RefusedSetting(
        TURNS,
        "--enable-lora-overlap-loading",
        "SGLang then loads adapters where it schedules prompts, which a decode server does not do",
    ),
    RefusedSetting(
        BUFFER,
        "no --enable-hierarchical-cache",
        "it is a mode of it",
        f"{{flag}} is a mode of --enable-hierarchical-cache. Add it, or remove {MODE}.",
        when="no --enable-hierarchical-cache without --disaggregation-mode decode",
    ),
)

#: Refused because SGLang turned it off for this model or backend, with only a log line.
FILLED_IN: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        RADIX,
        "--disable-radix-cache",
        "SGLang turns the tree off",
        "{flag} was given, but SGLang set --disable-radix-cache for this model or attention "
        "backend (its log says why). Choose another, or remove {flag}.",
    ),
    RefusedSetting(
        BUFFER,
        "no --enable-hierarchical-cache",
        "SGLang turns it off",
        "{flag} was given, but SGLang turned --enable-hierarchical-cache off for these arguments "
        f"(its log says why). Change them, or remove {MODE}.",
        when="no --enable-hierarchical-cache without --disaggregation-mode decode",
    ),
)

_NO_POOL = "their KV is not one pool of pages"
_STATE_LAYERS = "models with state-space or linear-attention layers"
_STOCK_TREE = "Remove {flag} to serve --model-path {model_path}."
_STOCK_HOST = (
    f"Use {MODE} cache for --model-path {{model_path}}, or no --enable-hierarchical-cache."
)
_ONE_POOL = (
    f"Add {NO_WINDOW_POOL}, in a pair to both servers: all layers are then in one pool, which "
    "holds 10 to 15 % fewer tokens at SGLang's --swa-full-tokens-ratio (MiMo-V2 does not fit in "
    "it). Or: "
)
#: Refused models, by their configuration.
MODELS: tuple[RefusedSetting, ...] = (
    *(
        RefusedSetting(
            flags,
            f"models with a pool of their own for sliding-window layers, without {NO_WINDOW_POOL}",
            _NO_POOL,
            when=conditions.has_window_pool,
            instead=_ONE_POOL + instead,
        )
        for flags, instead in ((RADIX, _STOCK_TREE), (BUFFER, _STOCK_HOST))
    ),
    RefusedSetting(
        BUFFER, _STATE_LAYERS, _NO_POOL, when=conditions.has_state_layers, instead=_STOCK_HOST
    ),
    RefusedSetting(
        TURNS,
        _STATE_LAYERS,
        "decode's tree has the KV of a prefix and no recurrent state to continue from",
        when=conditions.has_state_layers,
        instead="Remove {flag}.",
    ),
    RefusedSetting(
        RADIX,
        "multimodal models with --model-impl transformers",
        "SGLang turns their radix tree off",
        when=conditions.runs_on_transformers,
        instead=_STOCK_TREE,
    ),
)

#: Refused models with ``--speculative-algorithm``, by their configuration.
DRAFTED: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        RADIX,
        "--speculative-algorithm for a model with sparse attention (DSA)",
        "SGLang transfers the target's index only, so the draft model would use the index of "
        "another text",
        when=conditions.has_index,
    ),
    RefusedSetting(
        RADIX,
        "--speculative-algorithm for a model with recurrent state",
        "the states behind drafts have buffers of their own, and a decode server with them was not "
        "tested",
        when=conditions.has_state_layers,
    ),
)

#: Warned about and not refused: slower than the user may expect, which nothing else would show.
WARNED: tuple[RefusedSetting, ...] = (
    RefusedSetting(
        RADIX,
        "--enable-dp-attention",
        "every data parallel rank has its own tree",
        "{flag} with --enable-dp-attention: every data parallel rank has its own tree. Requests "
        "hit only if the router sends those with the same prefix to the same rank (prefix-aware "
        "routing).",
    ),
    RefusedSetting(
        HICACHE,
        "--speculative-algorithm",
        "the host and the store have no draft KV",
        "{flag} with --speculative-algorithm: the host and the store have no draft KV. After a "
        "prefix is loaded from them, the draft KV does not match the text, also on a decode server "
        "that receives it. Outputs are the same; fewer drafts are accepted.",
        when=conditions.drafts_behind_a_cache,
    ),
    RefusedSetting(
        BUFFER,
        "--hicache-storage-prefetch-policy best_effort",
        "a request uses only the pages that arrived before it is scheduled",
        "{flag} with --hicache-storage-prefetch-policy best_effort: a request uses only the pages "
        "that arrived before it is scheduled, often none. Use wait_complete or timeout.",
        when="--hicache-storage-prefetch-policy best_effort without --disaggregation-mode decode",
    ),
)


# ---- checks ----


def check_given(args: Any) -> None:
    """Raise ``ValueError`` for the first refused setting, as the user gave it."""
    for text in _texts((*AS_GIVEN, *ALWAYS), args, args):
        raise ValueError(text)


def check_filled_in(args: Any) -> None:
    """Raise ``ValueError`` for the first refused setting after SGLang has filled in the rest, and
    log warnings."""
    for text in _texts((*FILLED_IN, *ALWAYS), args, args):
        raise ValueError(text)
    for text in _texts(WARNED, args, args):
        logger.warning("%s", text)


def check_model(args: Any, config: Any) -> None:
    """Raise ``ValueError`` for a model that our flags do not support."""
    drafts = DRAFTED if args.speculative_algorithm is not None else ()
    for text in _texts((*MODELS, *drafts), args, config):
        raise ValueError(text)


def _texts(rows: Iterable[RefusedSetting], args: Any, subject: Any) -> Iterator[str]:
    """Yield the texts of the rows that apply to ``args``; ``subject``: argument of ``when``."""
    for row in rows:
        for flag in row.flags:
            if not is_given(args, flag):
                continue
            when = row.when or row.other
            if is_given(subject, when) if isinstance(when, str) else when(subject):
                default = f"{flag} cannot be combined with {row.other}: {row.why}. {row.instead}"
                yield (row.text or default).format(flag=flag, **vars(subject))
