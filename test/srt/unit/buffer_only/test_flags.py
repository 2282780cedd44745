"""Refused arguments of the mode; every refusal says how to proceed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.patchset import flags, refusals
from sglang.srt.patchset.args import check_numbers, check_pages, prefetch_threshold


def args(**changes):
    """Server arguments of an aggregated server that may use the mode."""
    accepted = {
        "hicache_host_memory_mode": "buffer_only",
        "hicache_buffer_pages": None,
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": None,
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
        "hicache_size": 0,
        "enable_hierarchical_cache": True,
        "disaggregation_mode": "null",
        "disable_radix_cache": False,
        "speculative_algorithm": None,
        "enable_lmcache": False,
        "enable_hisparse": False,
        "enable_streaming_session": False,
        "dllm_algorithm": None,
        "enable_pdmux": False,
        "kv_cache_dtype": "auto",
        "pp_size": 1,
        "attn_cp_size": 1,
        "page_size": 64,
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_enable_radix_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
        "enable_lora": False,
        "num_reserved_decode_tokens": 512,
        "disaggregation_decode_local_tokens": 0,
        "disaggregation_decode_fallback_prefill_tokens": 0,
        "disaggregation_decode_local_prefill_time_ratio": 0.5,
        "disaggregation_decode_local_max_itl_ms": 0.0,
    }
    assert changes.keys() <= accepted.keys()
    return SimpleNamespace(**accepted | changes)


def check_given(server_args):
    """Run the checks of the arguments that the user gave."""
    check_numbers(server_args)
    refusals.check_given(server_args)


def complete(server_args):
    """Run the checks after SGLang filled in the other arguments."""
    refusals.check_filled_in(server_args)
    check_pages(server_args)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", raising=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disaggregation_mode": "prefill"},
        {"hicache_write_policy": "write_through_selective"},
        {"hicache_storage_backend": "mooncake"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"hicache_buffer_pages": 8},
        {
            "hicache_buffer_pages": 2,
            "hicache_storage_backend_extra_config": '{"prefetch_threshold": 64}',
        },
    ],
    ids=str,
)
def test_accepted(changes):
    """Guards against a refusal of supported arguments."""
    server_args = args(**changes)
    check_given(server_args)
    complete(server_args)
    assert server_args.hicache_buffer_pages == changes.get("hicache_buffer_pages")


def test_sized_as_later_releases_size_it():
    """Guards against a server that refuses --hicache-size, by which SGLang 0.5.23 sizes the same
    stage, and against a number of pages that overrides it."""
    server_args = args(hicache_size=10)
    check_given(server_args)
    complete(server_args)
    assert server_args.hicache_buffer_pages is None


def test_a_cache_that_sglang_turned_off_is_refused():
    """SGLang turns it off for some arguments with only a warning; nothing would be stored."""
    with pytest.raises(ValueError, match="SGLang turned --enable-hierarchical-cache off"):
        complete(args(enable_hierarchical_cache=False))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        # SGLang's default, with which an idle server fetches nothing.
        ({"hicache_storage_prefetch_policy": "best_effort"}, "Use wait_complete or timeout"),
        # The store keeps no KV of drafts; only the accept rate would show it.
        ({"speculative_algorithm": "EAGLE"}, "fewer drafts are accepted"),
    ],
)
def test_slower_arguments_are_warned_of(caplog, changes, text):
    """Guards against arguments that work, but slower than a user may expect, without a warning."""
    complete(args(**changes))
    assert text in caplog.text


def test_the_stock_mode_is_not_checked():
    """Guards a server without the flag: it is stock SGLang, whatever its other arguments."""
    server_args = args(
        hicache_host_memory_mode="cache", hicache_write_policy="write_back", pp_size=4
    )
    check_given(server_args)
    assert not flags.wants_buffer_only(server_args)


RADIX = "disaggregation_decode_enable_radix_cache"
OFFLOAD = "disaggregation_decode_enable_offload_kvcache"
#: A decode server that writes its KV to the store.
WRITES = {
    "disaggregation_mode": "decode",
    "enable_hierarchical_cache": False,
    RADIX: True,
    OFFLOAD: True,
}


def test_a_decode_server_that_writes():
    """A decode server that writes is accepted, and needs the groups of all its flags."""
    server_args = args(**WRITES)
    check_given(server_args)
    complete(server_args)
    assert flags.needed_groups(server_args) == {
        flags.FLAG: ("decode_radix", "nixl_async"),
        flags.ON: ("buffer_only",),
        flags.OFFLOAD: ("decode_offload",),
    }


@pytest.mark.hazard("refused-combinations")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hicache_host_memory_mode": "buffer"}, "--hicache-host-memory-mode buffer "),
        ({"hicache_storage_backend": None}, "--hicache-storage-backend"),
        ({"hicache_storage_backend": "nixl"}, "--hicache-storage-backend nixl"),
        ({"hicache_storage_backend": "hf3fs"}, "--hicache-storage-backend hf3fs"),
        ({"hicache_storage_backend": "eic"}, "--hicache-storage-backend eic"),
        ({"hicache_storage_backend": "aibrix"}, "--hicache-storage-backend aibrix"),
        ({"hicache_write_policy": "write_back"}, "--hicache-write-policy write_back"),
        ({"hicache_buffer_pages": 7}, "--hicache-buffer-pages 7"),
        ({"hicache_buffer_pages": 0}, "--hicache-buffer-pages 0"),
        (
            {"hicache_buffer_pages": 64, "hicache_host_memory_mode": "cache"},
            "--hicache-buffer-pages 64",
        ),
        ({"enable_hierarchical_cache": False}, "--enable-hierarchical-cache"),
        ({"disaggregation_mode": "decode"}, "needs --disaggregation-decode-enable-radix-cache"),
        (WRITES | {RADIX: False}, "needs --disaggregation-decode-enable-radix-cache"),
        (WRITES | {OFFLOAD: False}, "--disaggregation-decode-enable-offload-kvcache"),
        (WRITES | {"hicache_host_memory_mode": "cache"}, "Add --hicache-host-memory-mode"),
        (WRITES | {"enable_lora": True}, "--enable-lora"),
        (WRITES | {"hicache_storage_backend": "nixl"}, "--hicache-storage-backend nixl"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"kv_cache_dtype": "fp4_e2m1"}, "--kv-cache-dtype fp4_e2m1"),
        ({"hicache_size": 10, "hicache_buffer_pages": 64}, "--hicache-size 10"),
        ({"hicache_size": -1}, "--hicache-size -1"),
        ({"pp_size": 2}, "--pipeline-parallel-size"),
        ({"attn_cp_size": 2}, "--attention-context-parallel-size"),
    ],
    ids=str,
)
def test_refused(changes, expected):
    """Guards against arguments that would silently lose KV, hang, or size a missing buffer."""
    with pytest.raises(ValueError) as error:
        server_args = args(**changes)
        check_given(server_args)
        complete(server_args)
    message = str(error.value)
    assert expected in message and (flags.MODE in message or flags.PAGES in message)
    assert any(way in message for way in ("Use ", "Remove ", "remove ", "Add "))


@pytest.mark.hazard("refused-combinations")
def test_refused_environment(monkeypatch):
    """The C++ tree is another class, which the mode does not patch."""
    monkeypatch.setenv("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "1")
    with pytest.raises(ValueError, match="SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1"):
        check_given(args())


class WithState:
    """A configuration of a model with state-space layers."""

    mamba2_cache_params = None


@pytest.mark.hazard("refused-combinations")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            SimpleNamespace(is_hybrid_swa=True, model_path="org/swa"),
            "Add --disable-hybrid-swa-memory",
        ),
        (SimpleNamespace(hf_config=WithState(), model_path="org/ssm"), "state-space"),
        (SimpleNamespace(hf_text_config=WithState(), model_path="org/ssm"), "state-space"),
    ],
    ids=["window", "state", "text state"],
)
def test_refused_models(config, expected):
    """The KV of these models is not one pool of pages that a prefix of tokens describes."""
    with pytest.raises(ValueError) as error:
        refusals.check_model(args(), config)
    message = str(error.value)
    assert expected in message and config.model_path in message and f"Use {flags.MODE}" in message


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (None, 256),
        ("{}", 256),
        ('{"prefetch_threshold": 32}', 32),
        ("@/some/file.json", 256),
        ("not json", 256),
        ("[1]", 256),
        ('{"prefetch_threshold": "many"}', 256),
    ],
)
def test_threshold(text, tokens):
    """Arguments that SGLang itself rejects, or reads from a file, are not guessed at here."""
    assert prefetch_threshold(text) == tokens
