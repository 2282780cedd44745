"""Our flags as they are written, and what a server needs that was given them.

``args`` is anything that has the attributes of ``ServerArgs``.
"""

from __future__ import annotations

from typing import Any  # Any: what has the attributes of ServerArgs

from sglang.srt.patchset import environment

FLAG = "--disaggregation-decode-enable-radix-cache"
LOCAL = "--disaggregation-decode-local-tokens"
LOCAL_WHEN_LOST = "--disaggregation-decode-fallback-prefill-tokens"
LOCAL_SHARE = "--disaggregation-decode-local-prefill-time-ratio"
LOCAL_MAX_ITL = "--disaggregation-decode-local-max-itl-ms"
OFFLOAD = "--disaggregation-decode-enable-offload-kvcache"
MODE = "--hicache-host-memory-mode"
MODES = ("cache", "buffer_only")
ON = f"{MODE} buffer_only"
PAGES = "--hicache-buffer-pages"
SIZE = "--hicache-size"
RATIO = "--hicache-ratio"
#: SGLang's default for it, which is for a cache: as good as not given.
CACHE_RATIO = 2.0
#: SGLang's flag. With it, layers with a sliding window have their KV in the pool of all layers.
#: Without it they have a second pool, which a pair transfers as state.
NO_WINDOW_POOL = "--disable-hybrid-swa-memory"

#: The fields of ``ServerArgs`` that are not named as their flags.
FIELDS = {
    "--pipeline-parallel-size": "pp_size",
    "--attention-context-parallel-size": "attn_cp_size",
}

#: Transfer backends whose sender and receiver of ours move only the missing pages, each with the
#: feature group (``patchset/table.py``) that they are in.
DELTA_BACKENDS: dict[str, str] = {"nixl": "nixl_async", "mooncake": "mooncake_delta"}

#: Attention of latent KV that on a decode server lacks what SGLang's chunked prefix cache calls
#: (``FlashInferMLAAttnBackend.enable_chunk_kv``, and what inherits it).
NO_PREFIX_CHUNKS = {"flashinfer", "flashmla", "cutlass_mla", "trtllm_mla"}


def is_given(args: Any, setting: str) -> bool:
    """Whether a server was given ``setting``, as a user writes it: "--flag", "--flag value",
    "--flag above 1", "another --flag than one, two", "no --flag", or one of SGLang's own switches,
    "SGLANG_NAME=1"."""
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
    """True if a server with these arguments reads KV from the store."""
    return wants_buffer_only(args) and args.disaggregation_mode != "decode"


def writes_to_store(args: Any) -> bool:
    """True if a decode server with these arguments writes its KV to the store. Without ``OFFLOAD``
    the mode is refused."""
    return wants_buffer_only(args) and args.disaggregation_mode == "decode"


def computes_turns(args: Any) -> bool:
    """Whether a server with these arguments computes turns itself, be it where prefill is lost."""
    tokens = (
        args.disaggregation_decode_local_tokens,
        args.disaggregation_decode_fallback_prefill_tokens,
    )
    return args.disaggregation_mode == "decode" and any(tokens)


def checks_invariants(args: Any) -> bool:
    """Whether an idle server looks what it has left behind."""
    return environment.CHECK_INVARIANTS.read()


def backend_group(args: Any) -> tuple[str, ...]:
    """The feature group of the transfer backend; none for those that are SGLang's own."""
    group = DELTA_BACKENDS.get(args.disaggregation_transfer_backend)
    return () if group is None else (group,)


def needed_groups(args: Any) -> dict[str, tuple[str, ...]]:
    """The feature groups that each of our flags needs which was given."""
    needed = {}
    if wants_radix_cache(args):
        needed[FLAG] = ("decode_radix", *backend_group(args))
    if wants_buffer_only(args):
        needed[ON] = ("buffer_only",)
    if writes_to_store(args):
        needed[OFFLOAD] = ("decode_offload",)
    return needed


def attend_prefixes_whole(args: Any) -> None:
    """Turn SGLang's chunked prefix cache off where a local chunk behind a prefix would end the
    server: its decode servers never run a prompt, and prepare nothing for one."""
    if computes_turns(args):
        extends = {args.get_attention_backends()[0], args.speculative_draft_attention_backend}
        if extends & NO_PREFIX_CHUNKS:
            args.disable_chunked_prefix_cache = True
