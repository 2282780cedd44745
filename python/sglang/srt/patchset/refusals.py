"""Which settings are refused together, before any memory or weights are touched: the same conflict
found later would end a running server at its first request.

A refusal is a row: our flag, the setting that is refused with it, and why. A new one is a row
of ``ALWAYS``, as ``Refusal(RADIX, "--enable-x", "it has its own tree")``, and one of the tests';
``python -m benchmark.tables`` then prints it into README and docs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any  # Any: what has the attributes of ServerArgs, ModelConfig

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

#: Storage backends that the staging buffer is tested with; ``dynamic`` is a class of one's own.
STORES = ("mooncake", "file", "dynamic")
#: Speculation whose draft model has KV with the target's page indices. SGLang reads NEXTN as EAGLE.
DRAFTING = ("EAGLE", "EAGLE3", "NEXTN")


@dataclass(frozen=True)
class Refusal:
    """One setting that is refused with a flag of ours."""

    #: Any of these flags, as written on a command line.
    flags: tuple[str, ...]
    #: The setting as a user writes it, and why it is refused.
    other: str
    why: str
    #: The error, where it is not the usual one; ``{flag}`` and ``{attribute}`` are filled in.
    text: str = ""
    #: Whether it is given, where ``flags.is_given`` cannot read that from ``other``: a function of
    #: the arguments, or of the model's configuration.
    when: Callable[[Any], bool] | None = None
    #: The way out.
    instead: str = "Remove one of them."


# ---- the rows ----

RADIX, TURNS, BUFFER = (FLAG,), (LOCAL, LOCAL_WHEN_LOST), (ON,)
FP4, HICACHE = ("--kv-cache-dtype fp4_e2m1",), ("--enable-hierarchical-cache",)
_BACKENDS, _DRAFTS, _STORES = map(", ".join, (DELTA_BACKENDS, DRAFTING, STORES))

#: Refused as the user gave them, and as SGLang has filled in the rest.
ALWAYS: tuple[Refusal, ...] = (
    Refusal(
        RADIX,
        "another --disaggregation-mode than decode",
        "a prefill server needs no flag to take part",
        "{flag} is for decode servers, but --disaggregation-mode is {disaggregation_mode}. Give it "
        "to the decode server only; a prefill server needs no flag to take part.",
    ),
    Refusal(
        RADIX,
        f"another --disaggregation-transfer-backend than {_BACKENDS}",
        "it cannot send a part of a prompt",
        "{flag} needs a transfer backend that can send a part of a prompt, and "
        "--disaggregation-transfer-backend {disaggregation_transfer_backend} cannot. Use "
        f"one of {_BACKENDS}.",
    ),
    Refusal(
        RADIX, "--enable-hisparse", "it keeps only a part of a request's KV in the device pool"
    ),
    Refusal(
        RADIX,
        f"{OFFLOAD} without {ON}",
        "SGLang's offload frees the pages of finished requests, which the radix cache keeps",
        instead=f"Add {ON}: decode then writes its KV to the store and keeps it in the radix "
        f"cache. Or remove {OFFLOAD}.",
        when=conditions.offloads_as_sglang,
    ),
    Refusal(
        RADIX,
        "--enable-hierarchical-cache",
        "a decode server does not run its copies to the host",
    ),
    Refusal(RADIX, "--enable-lmcache", "it has its own tree"),
    Refusal(
        RADIX + BUFFER, "--enable-streaming-session", "it wraps the tree and keeps pages itself"
    ),
    Refusal(RADIX, "SGLANG_DISAGG_STAGING_BUFFER=1", "it always receives whole prompts"),
    Refusal(RADIX + BUFFER, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1", "it replaces the radix tree"),
    Refusal(
        RADIX,
        "--speculative-algorithm STANDALONE",
        "SGLang's decode server does not initialise such a draft model after a transfer, and its "
        "metadata buffers are smaller than those of prefill",
    ),
    Refusal(
        RADIX,
        "--speculative-algorithm NGRAM",
        "SGLang's decode server does not draft from n-grams after a transfer",
    ),
    Refusal(
        RADIX,
        f"another --speculative-algorithm than {_DRAFTS}",
        "what its draft model needs to be transferred is unknown",
        "{flag} cannot be combined with --speculative-algorithm {speculative_algorithm}: what its "
        "draft model needs to be transferred is unknown. Remove one of them.",
    ),
    Refusal(
        RADIX,
        "--speculative-eagle-topk above 1",
        "a tree of drafts takes more slots than admission counts; SGLang chooses it itself for "
        "Llama and Grok models, so give 1",
        "{flag} cannot be combined with --speculative-eagle-topk {speculative_eagle_topk} "
        "(SGLang's own choice for some models where none is given): a tree of drafts takes more "
        "slots than admission counts; use --speculative-eagle-topk 1. Remove one of them.",
        when=conditions.drafts_trees,
    ),
    Refusal(
        RADIX,
        "--enable-multi-layer-eagle",
        "each of its layers has a KV pool of its own, and SGLang transfers the first only",
        when=conditions.drafts_in_layers,
    ),
    Refusal(
        RADIX,
        f"SGLANG_ENABLE_SPEC_V2=1 with more than {conditions.MOST_DRAFTS_V2} draft tokens",
        "SGLang's rows of slots are too short for them",
        "{flag} cannot be combined with SGLANG_ENABLE_SPEC_V2=1 with "
        "{speculative_num_draft_tokens} draft tokens: SGLang's rows of slots are too short for "
        f"them; use --speculative-num-steps {conditions.MOST_DRAFTS_V2 - 1} at most. Remove one "
        "of them.",
        when=conditions.drafts_beyond_its_row,
    ),
    Refusal(
        RADIX,
        "--mamba-scheduler-strategy extra_buffer",
        "it keeps states for a tree with states, and decode's tree has none",
    ),
    Refusal(
        RADIX,
        "--pipeline-parallel-size above 1",
        "the stages would each match their own tree, without agreeing on a length",
    ),
    Refusal(
        RADIX,
        "--num-reserved-decode-tokens below --page-size",
        "the admission budget ignores the rounding to pages",
        "{flag} needs --num-reserved-decode-tokens ({num_reserved_decode_tokens}) to be at least "
        "--page-size ({page_size}), or the admission budget ignores the rounding to pages. Use "
        "--num-reserved-decode-tokens {page_size} or more.",
        when=conditions.reserves_less_than_a_page,
    ),
    Refusal(
        BUFFER,
        f"--disaggregation-mode decode, without {FLAG} and {OFFLOAD}",
        "a decode server loads nothing from the store, and writes only with both",
        f"{{flag}} on a decode server needs {FLAG} and {OFFLOAD}: it loads nothing from the store, "
        f"and writes only with both. Add them, or remove {MODE} on the decode server.",
        when=conditions.writes_nothing,
    ),
    Refusal(
        BUFFER,
        "--enable-lora on a decode server",
        "SGLang names adapters differently on each server, so no prefill server would find what is "
        "written for them",
        instead=f"Remove {ON} and {OFFLOAD}, or --enable-lora.",
        when=conditions.writes_adapters,
    ),
    Refusal(
        BUFFER,
        "no --hicache-storage-backend",
        "that is where KV is stored",
        "{flag} stores KV in a storage backend, but --hicache-storage-backend is not given. Add "
        f"--hicache-storage-backend, or use {MODE} cache.",
    ),
    Refusal(
        BUFFER,
        f"another --hicache-storage-backend than {_STORES}",
        "this package was not tested with it",
        "{flag} does not support --hicache-storage-backend {hicache_storage_backend}: this package "
        f"was not tested with it. Use one of {_STORES}, or {MODE} cache.",
    ),
    Refusal(
        BUFFER,
        "--hicache-write-policy write_back",
        "it writes KV to the store only on eviction",
        "{flag} writes KV to the store while it is on the device; --hicache-write-policy "
        "write_back writes it only on eviction. Use --hicache-write-policy write_through or "
        "write_through_selective.",
    ),
    Refusal(BUFFER, "--disable-radix-cache", "without a radix tree no KV is shared"),
    Refusal(BUFFER, "--enable-lmcache", "it has its own tree and host tier"),
    Refusal(BUFFER, "--enable-hisparse", "it keeps a part of a request's KV on the host"),
    Refusal(BUFFER, "--dllm-algorithm", "its scheduler loop does not call the store"),
    Refusal(BUFFER, "--enable-pdmux", "its prefills do not wait for loads from the store"),
    Refusal(
        BUFFER,
        "--kv-cache-dtype fp4_e2m1",
        "SGLang's host pools support neither its layout nor its scales",
        instead="Use --kv-cache-dtype auto or fp8_e4m3, or remove --enable-hierarchical-cache.",
    ),
    Refusal(
        BUFFER,
        "--pipeline-parallel-size above 1",
        "its ranks would fetch different lengths of a prefix",
        instead=f"Use --pipeline-parallel-size 1, or {MODE} cache.",
    ),
    Refusal(
        BUFFER,
        "--attention-context-parallel-size above 1",
        "its ranks would fetch different lengths of a prefix",
        instead=f"Use --attention-context-parallel-size 1, or {MODE} cache.",
    ),
)

#: Refused as the user gave them. SGLang may set the same itself, for reasons of its own.
AS_GIVEN: tuple[Refusal, ...] = (
    # On both servers of a pair, with or without our flags: each answer would be wrong.
    Refusal(
        FP4,
        "--disaggregation-mode prefill or decode",
        "SGLang transfers such KV without its scales",
        "{flag} cannot be combined with --disaggregation-mode {disaggregation_mode}: SGLang "
        "transfers such KV without its scales. With multi-head attention, the transfer even writes "
        "outside the pool. Use --kv-cache-dtype auto or fp8_e4m3 on both servers.",
        when=conditions.is_in_a_pair,
    ),
    Refusal(RADIX, "--disable-radix-cache", "one turns on what the other turns off"),
    Refusal(
        TURNS,
        f"no {FLAG}",
        "a decode server without the cache has no KV of earlier turns",
        f"{{flag}} needs {FLAG}: without the cache a decode server has no KV of earlier turns and "
        f"would compute the whole session each turn. Add {FLAG} to the decode server, or remove "
        "{flag}.",
    ),
    Refusal(
        TURNS,
        "--deepep-mode low_latency",
        "its buffers are made for decode steps, and a chunk of a prompt does not fit",
        instead="Use --deepep-mode auto, or remove {flag}.",
        when=conditions.has_buffers_for_decode_steps,
    ),
    Refusal(
        TURNS,
        "--moe-a2a-backend mooncake or nixl",
        "SGLang runs decode steps with them, and no chunk of a prompt",
        when=conditions.dispatches_decode_steps_only,
    ),
    Refusal(
        TURNS,
        "--enable-dp-attention with --speculative-algorithm",
        "a two-rank decode server with both terminated at its first requests, cause unknown",
        when=conditions.drafts_on_data_parallel_ranks,
    ),
    Refusal(
        TURNS,
        "SGLANG_SCHEDULER_SKIP_ALL_GATHER=1",
        "data parallel ranks then do not learn that one of them runs a chunk",
    ),
    Refusal(
        TURNS,
        "--enable-lora-overlap-loading",
        "SGLang then loads adapters where it schedules prompts, which a decode server does not do",
    ),
    Refusal(
        BUFFER,
        "no --enable-hierarchical-cache",
        "it is a mode of it",
        f"{{flag}} is a mode of --enable-hierarchical-cache. Add it, or remove {MODE}.",
        when=conditions.lacks_the_cache,
    ),
)

#: What SGLang itself turns off for some models and backends, with only a line in its log.
FILLED_IN: tuple[Refusal, ...] = (
    Refusal(
        RADIX,
        "--disable-radix-cache",
        "SGLang turns the tree off",
        "{flag} was given, but SGLang set --disable-radix-cache for this model or attention "
        "backend (its log says why). Choose another, or remove {flag}.",
    ),
    Refusal(
        BUFFER,
        "no --enable-hierarchical-cache",
        "SGLang turns it off",
        "{flag} was given, but SGLang turned --enable-hierarchical-cache off for these arguments "
        f"(its log says why). Change them, or remove {MODE}.",
        when=conditions.lacks_the_cache,
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
#: Models, by their configuration.
MODELS: tuple[Refusal, ...] = (
    *(
        Refusal(
            flags,
            f"models with a pool of their own for sliding-window layers, without {NO_WINDOW_POOL}",
            _NO_POOL,
            when=conditions.has_window_pool,
            instead=_ONE_POOL + instead,
        )
        for flags, instead in ((RADIX, _STOCK_TREE), (BUFFER, _STOCK_HOST))
    ),
    Refusal(BUFFER, _STATE_LAYERS, _NO_POOL, when=conditions.has_state_layers, instead=_STOCK_HOST),
    Refusal(
        TURNS,
        _STATE_LAYERS,
        "decode's tree has the KV of a prefix and no recurrent state to continue from",
        when=conditions.has_state_layers,
        instead="Remove {flag}.",
    ),
    Refusal(
        RADIX,
        "multimodal models with --model-impl transformers",
        "SGLang turns their radix tree off",
        when=conditions.runs_on_transformers,
        instead=_STOCK_TREE,
    ),
)

#: Models with ``--speculative-algorithm``, by their configuration.
DRAFTED: tuple[Refusal, ...] = (
    Refusal(
        RADIX,
        "--speculative-algorithm for a model with sparse attention (DSA)",
        "SGLang transfers the target's index only, so the draft model would use the index of "
        "another text",
        when=conditions.has_index,
    ),
    Refusal(
        RADIX,
        "--speculative-algorithm for a model with recurrent state",
        "the states behind drafts have buffers of their own, and a decode server with them was not "
        "tested",
        when=conditions.has_state_layers,
    ),
)

#: Not refused, but slower than who asked for it may think: nothing else would show it.
WARNED: tuple[Refusal, ...] = (
    Refusal(
        RADIX,
        "--enable-dp-attention",
        "every data parallel rank has its own tree",
        "{flag} with --enable-dp-attention: every data parallel rank has its own tree. Requests "
        "hit only if the router sends those with the same prefix to the same rank (prefix-aware "
        "routing).",
    ),
    Refusal(
        HICACHE,
        "--speculative-algorithm",
        "the host and the store have no draft KV",
        "{flag} with --speculative-algorithm: the host and the store have no draft KV. After a "
        "prefix is loaded from them, the draft KV does not match the text, also on a decode server "
        "that receives it. Outputs are the same; fewer drafts are accepted.",
        when=conditions.drafts_behind_a_cache,
    ),
    Refusal(
        BUFFER,
        "--hicache-storage-prefetch-policy best_effort",
        "a request uses only the pages that arrived before it is scheduled",
        "{flag} with --hicache-storage-prefetch-policy best_effort: a request uses only the pages "
        "that arrived before it is scheduled, often none. Use wait_complete or timeout.",
        when=conditions.loads_what_came,
    ),
)


# ---- checks ----


def check_given(args: Any) -> None:
    """Raise ``ValueError`` at the first setting, as the user gave it, that does not fit."""
    for text in _texts((*AS_GIVEN, *ALWAYS), args, args):
        raise ValueError(text)


def check_filled_in(args: Any) -> None:
    """The same once SGLang has filled in what the user left out, and warn."""
    for text in _texts((*FILLED_IN, *ALWAYS), args, args):
        raise ValueError(text)
    for text in _texts(WARNED, args, args):
        logger.warning("%s", text)


def check_model(args: Any, config: Any) -> None:
    """Raise ``ValueError`` for a model that our flags do not support."""
    drafts = DRAFTED if args.speculative_algorithm is not None else ()
    for text in _texts((*MODELS, *drafts), args, config):
        raise ValueError(text)


def _texts(rows: Iterable[Refusal], args: Any, subject: Any) -> Iterator[str]:
    """What is to be said of a server with ``args``; ``subject``: what ``when`` looks at."""
    for row in rows:
        for flag in row.flags:
            if not is_given(args, flag):
                continue
            if row.when(subject) if row.when else is_given(subject, row.other):
                usual = f"{flag} cannot be combined with {row.other}: {row.why}. {row.instead}"
                yield (row.text or usual).format(flag=flag, **vars(subject))
