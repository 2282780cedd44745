"""Names of our flags, and the feature groups and mixins that a server with them needs.

``args`` has the attributes of ``ServerArgs``.
"""

from __future__ import annotations

from typing import Any  # Any: an object with the attributes of ServerArgs

from sglang.srt.patchset import environment

FLAG = "--disaggregation-decode-enable-radix-cache"
LOCAL = "--disaggregation-decode-local-tokens"
LOCAL_WHEN_LOST = "--disaggregation-decode-fallback-prefill-tokens"
LOCAL_TIME_RATIO = "--disaggregation-decode-local-prefill-time-ratio"
LOCAL_MAX_ITL = "--disaggregation-decode-local-max-itl-ms"
OFFLOAD = "--disaggregation-decode-enable-offload-kvcache"
MODE = "--hicache-host-memory-mode"
MODES = ("cache", "buffer_only")
ON = f"{MODE} buffer_only"
PAGES = "--hicache-buffer-pages"
SIZE = "--hicache-size"
RATIO = "--hicache-ratio"
#: SGLang's default for ``--hicache-ratio``. Sized for a cache, so that it counts as not given.
CACHE_RATIO = 2.0
#: SGLang's flag that keeps the KV of sliding-window layers in the pool of all layers. By default
#: they have a second pool, which a pair transfers as state.
NO_WINDOW_POOL = "--disable-hybrid-swa-memory"

#: Flag -> field of ``ServerArgs``, where the names differ.
FIELDS = {
    "--pipeline-parallel-size": "pp_size",
    "--attention-context-parallel-size": "attn_cp_size",
}

#: Transfer backend that can move only the missing pages -> its feature group
#: (``patchset/table.py``).
DELTA_BACKENDS: dict[str, str] = {"nixl": "nixl_async", "mooncake": "mooncake_delta"}

#: MLA attention backends that on a decode server lack methods that SGLang's chunked prefix cache
#: calls (``FlashInferMLAAttnBackend.enable_chunk_kv`` and its subclasses).
NO_PREFIX_CHUNKS = {"flashinfer", "flashmla", "cutlass_mla", "trtllm_mla"}


def parts_of(setting: str) -> list[str]:
    """Return the settings that ``setting`` combines: "one with another", "one without another"."""
    return setting.replace(" without ", " with no ").split(" with ")


def is_given(args: Any, setting: str) -> bool:
    """Return True if a server was given ``setting``, in a user's notation: "--flag", "--flag
    value", "--flag above 1", "another --flag than one, two", "no --flag", a switch of SGLang's own,
    "SGLANG_NAME=1", or several of them (``parts_of``)."""
    if len(parts := parts_of(setting)) > 1:
        return all(is_given(args, part) for part in parts)
    if setting.startswith("no "):
        return not is_given(args, setting.removeprefix("no "))
    if setting.startswith("SGLANG_"):
        return environment.sglang_switch(setting.removesuffix("=1"))
    flag, _, value = setting.removeprefix("another ").partition(" ")
    found: Any = getattr(args, FIELDS.get(flag, flag[2:].replace("-", "_")), None)
    if value.startswith("than "):
        return str(found) not in ("None", *value.removeprefix("than ").split(", "))
    if value.startswith("above "):
        return bool((found or 0) > float(value.removeprefix("above ")))
    return str(found) == value if value else bool(found)


def wants_radix_cache(args: Any) -> bool:
    return is_given(args, FLAG)


def wants_buffer_only(args: Any) -> bool:
    return is_given(args, ON)


def loads_from_store(args: Any) -> bool:
    """Return True if a server with these arguments reads KV from the store."""
    return wants_buffer_only(args) and args.disaggregation_mode != "decode"


def writes_to_store(args: Any) -> bool:
    """Return True if a decode server with these arguments writes its KV to the store. Without
    ``OFFLOAD`` the mode is refused."""
    return wants_buffer_only(args) and args.disaggregation_mode == "decode"


def computes_turns(args: Any) -> bool:
    """Return True if a server with these arguments computes turns itself, or does so when prefill
    is lost."""
    tokens = (
        args.disaggregation_decode_local_tokens,
        args.disaggregation_decode_fallback_prefill_tokens,
    )
    return args.disaggregation_mode == "decode" and any(tokens)


def checks_invariants(args: Any) -> bool:
    """Return True if an idle server checks its invariants."""
    return environment.CHECK_INVARIANTS.read()


def backend_group(args: Any) -> tuple[str, ...]:
    """Return the feature group of the transfer backend; empty for a stock backend."""
    group = DELTA_BACKENDS.get(args.disaggregation_transfer_backend)
    return () if group is None else (group,)


def needed_groups(args: Any) -> dict[str, tuple[str, ...]]:
    """Return each given flag of ours with the feature groups that it needs."""
    needed = {}
    if wants_radix_cache(args):
        needed[FLAG] = ("decode_radix", *backend_group(args))
    if wants_buffer_only(args):
        needed[ON] = ("buffer_only",)
    if writes_to_store(args):
        needed[OFFLOAD] = ("decode_offload",)
    return needed


def attend_prefixes_whole(args: Any) -> None:
    """Turn SGLang's chunked prefix cache off if a local chunk after a prefix would end the server,
    because SGLang's decode servers never run a prompt and do not set up the cache."""
    if computes_turns(args):
        extends = {args.get_attention_backends()[0], args.speculative_draft_attention_backend}
        if extends & NO_PREFIX_CHUNKS:
            args.disable_chunked_prefix_cache = True
