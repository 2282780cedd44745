"""Refused combinations on decode servers and pairs; every refusal says how to proceed."""

from __future__ import annotations

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sglang.srt.patchset import flags, refusals
from sglang.srt.patchset.args import check_numbers


def args(**changes):
    """Return server arguments of a decode server with the radix cache."""
    accepted = {
        "disaggregation_decode_enable_radix_cache": True,
        "disaggregation_decode_local_tokens": 0,
        "disaggregation_decode_fallback_prefill_tokens": 0,
        "disaggregation_decode_local_prefill_time_ratio": 0.5,
        "disaggregation_decode_local_max_itl_ms": 0.0,
        "hicache_host_memory_mode": "cache",
        "hicache_buffer_pages": None,
        "hicache_size": 0,
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "nixl",
        "disable_radix_cache": False,
        "disaggregation_decode_enable_offload_kvcache": False,
        "enable_hisparse": False,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "enable_multi_layer_eagle": False,
        "enable_hierarchical_cache": False,
        "enable_lmcache": False,
        "enable_streaming_session": False,
        "enable_dp_attention": False,
        "kv_cache_dtype": "auto",
        "pp_size": 1,
        "mamba_scheduler_strategy": "auto",
        "num_reserved_decode_tokens": 512,
        "page_size": None,
        "moe_a2a_backend": "none",
        "deepep_mode": "auto",
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "enable_lora_overlap_loading": None,
    }
    assert changes.keys() <= accepted.keys()
    return SimpleNamespace(**accepted | changes)


def check(server_args):
    """Run the checks of the arguments that the user gave."""
    check_numbers(server_args)
    refusals.check_given(server_args)


@contextmanager
def refusal(expected):
    """Expect a refusal whose text contains ``expected``, and collect the text; expect no refusal if
    ``expected`` is None."""
    message = []
    if expected is None:
        yield message
        return
    with pytest.raises(ValueError) as error:
        yield message
    message.append(str(error.value))
    assert expected in message[0]


def case_id(value):
    """Return the reason for the refusal as the id of a case."""
    return value if isinstance(value, str) else "accepted" if value is None else ""


# ---- the decode radix flag ----

#: Settings beside the flag, and the text of the refusal; None: they are allowed.
SETTINGS = [
    ({"page_size": 1}, None),
    ({"page_size": 512}, None),
    ({"disaggregation_transfer_backend": "mooncake"}, None),
    # The user writes NEXTN, SGLang changes it to EAGLE; the number of drafts may be left to SGLang.
    ({"speculative_algorithm": "EAGLE"}, None),
    ({"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1}, None),
    ({"speculative_algorithm": "NEXTN"}, None),
    ({"disaggregation_mode": "prefill"}, "--disaggregation-mode is prefill"),
    ({"disaggregation_mode": "null"}, "--disaggregation-mode is null"),
    ({"disaggregation_transfer_backend": "mori"}, "--disaggregation-transfer-backend mori"),
    ({"disaggregation_transfer_backend": "ascend"}, "--disaggregation-transfer-backend ascend"),
    ({"disaggregation_transfer_backend": "fake"}, "--disaggregation-transfer-backend fake"),
    ({"enable_hisparse": True}, "--enable-hisparse"),
    ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm STANDALONE"),
    ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm NGRAM"),
    ({"speculative_algorithm": "LATER"}, "--speculative-algorithm LATER"),
    (
        {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
        "--speculative-eagle-topk 4",
    ),
    (
        {"speculative_algorithm": "EAGLE", "enable_multi_layer_eagle": True},
        "--enable-multi-layer-eagle",
    ),
    (
        {"disaggregation_decode_enable_offload_kvcache": True},
        "--disaggregation-decode-enable-offload-kvcache",
    ),
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
    ({"enable_lmcache": True}, "--enable-lmcache"),
    ({"enable_streaming_session": True}, "--enable-streaming-session"),
    ({"pp_size": 2}, "--pipeline-parallel-size"),
    ({"mamba_scheduler_strategy": "no_buffer"}, None),
    ({"mamba_scheduler_strategy": "extra_buffer"}, "--mamba-scheduler-strategy extra_buffer"),
    ({"page_size": 16, "num_reserved_decode_tokens": 15}, "--num-reserved-decode-tokens (15)"),
    ({"page_size": 16, "num_reserved_decode_tokens": 16}, None),
]
#: Some of SGLang's switches are environment variables and conflict in the same way.
DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 9}
VARIABLES = [
    ("SGLANG_DISAGG_STAGING_BUFFER", "1", {}, "SGLANG_DISAGG_STAGING_BUFFER=1"),
    ("SGLANG_DISAGG_STAGING_BUFFER", "", {}, None),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "true", {}, "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1"),
    ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "0", {}, None),
    ("SGLANG_ENABLE_SPEC_V2", "1", DRAFTS, "--speculative-num-draft-tokens above 8"),
    ("SGLANG_ENABLE_SPEC_V2", "1", DRAFTS | {"speculative_num_draft_tokens": 8}, None),
    ("SGLANG_ENABLE_SPEC_V2", "0", DRAFTS, None),
]


@pytest.mark.hazard("offload-manager", "receivers-without-prefix", "radix-beside-hicache")
@pytest.mark.parametrize(
    ("variable", "value", "changes", "expected"),
    [*(("SGLANG_ENABLE_SPEC_V2", "0", *row) for row in SETTINGS), *VARIABLES],
    ids=case_id,
)
def test_settings_of_the_radix_flag(monkeypatch, variable, value, changes, expected):
    """Guards against settings that would corrupt KV or end the server at its first request."""
    monkeypatch.setenv(variable, value)
    with refusal(expected) as message:
        check(args(**changes))
    with refusal(expected):  # also if SGLang itself set it
        refusals.check_filled_in(args(**changes))
    for text in message:
        assert text.startswith(flags.FLAG)
        assert any(way in text for way in ("Use ", "Remove one", "Give it to", "Unset", "Add "))


@pytest.mark.hazard("flag-ineffective")
@pytest.mark.parametrize("check", [refusals.check_given, refusals.check_filled_in])
def test_a_tree_that_is_off(check):
    """The two flags together are a mistake: neither may win silently. SGLang disables the tree for
    some models with only a log line, which must not go unnoticed."""
    check(args())
    with pytest.raises(ValueError, match=f"{flags.FLAG} .* --disable-radix-cache"):
        check(args(disable_radix_cache=True))


class StateSpaceConfig:
    """A configuration of a model with state layers, like SGLang's."""

    @property
    def mamba2_cache_params(self):
        """Fails if a mere check computes it."""
        raise AssertionError


def model(hf_config=None, **changes):
    """Return a model configuration with plain attention. A window in the configuration alone says
    nothing about the pool."""
    plain = SimpleNamespace(index_topk=None, sliding_window=4096)
    return SimpleNamespace(
        model_path="m", hf_config=hf_config or plain, hf_text_config=plain, **changes
    )


SPARSE = model(SimpleNamespace(index_topk=2048))


@pytest.mark.hazard("state-beyond-prefix", "unfit-models")
@pytest.mark.parametrize(
    ("config", "algorithm", "expected"),
    [
        (model(), None, None),
        (model(), "EAGLE", None),
        (model(is_multimodal=True, model_impl="auto"), None, None),
        (model(is_hybrid_swa=False), None, None),
        (SPARSE, None, None),
        (model(is_hybrid_swa=True), None, "Add --disable-hybrid-swa-memory, in a pair to both"),
        (model(StateSpaceConfig()), None, None),
        (model(StateSpaceConfig()), "NEXTN", "--speculative-algorithm for a model with recurrent"),
        (
            model(is_multimodal=True, model_impl="transformers"),
            None,
            "--model-impl transformers",
        ),
        # SGLang sends no index of a draft model.
        (SPARSE, "NEXTN", "--speculative-algorithm for a model with sparse"),
        (SPARSE, "EAGLE", "--speculative-algorithm for a model with sparse"),
    ],
    ids=case_id,
)
def test_models_of_the_radix_flag(config, algorithm, expected):
    """Guards against KV that is more than one pool of pages; if found only after the weights are
    loaded, it costs minutes."""
    with refusal(expected) as message:
        refusals.check_model(args(speculative_algorithm=algorithm), config)
    assert all(flags.FLAG in text for text in message)
    assert all("--model-path" in text or algorithm for text in message)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"disaggregation_decode_local_tokens": 8}, flags.LOCAL),
        ({"disaggregation_decode_fallback_prefill_tokens": 8}, flags.LOCAL_WHEN_LOST),
        ({"hicache_host_memory_mode": "buffer_only"}, flags.ON),
    ],
)
def test_features_that_recurrent_state_excludes(arguments, expected):
    """Tree and store hold only KV: a model that continues from a prefix there has no state."""
    with refusal(expected) as message:
        refusals.check_model(args(**arguments), model(StateSpaceConfig()))
    assert "state-space or linear-attention" in message[0]
    with refusal(None):
        refusals.check_model(args(**arguments), model())


# ---- without a flag ----


@pytest.mark.parametrize(
    ("mode", "backend", "dtype", "expected"),
    [
        ("prefill", "nixl", "fp4_e2m1", "--disaggregation-mode prefill"),
        ("decode", "mooncake", "fp4_e2m1", "--disaggregation-mode decode"),
        ("decode", "nixl", "fp8_e4m3", None),
        ("null", "nixl", "fp4_e2m1", None),
        ("prefill", "ascend", "fp4_e2m1", None),
    ],
)
def test_kv_that_a_pair_transfers_incompletely(mode, backend, dtype, expected):
    """Without a flag too: decode read keys without their scales, and for multi-head attention the
    transfer overwrote other requests' memory."""
    arguments = {
        "disaggregation_mode": mode,
        "disaggregation_transfer_backend": backend,
        "kv_cache_dtype": dtype,
    }
    with refusal(expected) as message:
        check(args(disaggregation_decode_enable_radix_cache=False, **arguments))
    assert all("Use --kv-cache-dtype" in text for text in message)


DRAFTS_BEHIND_HICACHE = {
    "disaggregation_decode_enable_radix_cache": False,
    "disaggregation_mode": "prefill",
    "enable_hierarchical_cache": True,
    "speculative_algorithm": "EAGLE",
}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        # Drafts that are rejected behind loaded KV, without a visible reason.
        (DRAFTS_BEHIND_HICACHE, "fewer drafts are accepted"),
        (DRAFTS_BEHIND_HICACHE | {"disaggregation_mode": "decode"}, None),
        (DRAFTS_BEHIND_HICACHE | {"enable_hierarchical_cache": False}, None),
        (DRAFTS_BEHIND_HICACHE | {"speculative_algorithm": None}, None),
        # The combination works, but has no hits without a prefix-aware router.
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({}, None),
    ],
)
def test_combinations_with_a_warning(caplog, arguments, line):
    """Guards against an unexplained loss of speed, and against a false warning."""
    refusals.check_filled_in(args(**arguments))
    assert [line in text for text in caplog.messages] == [True] * (line is not None)


# ---- local turns ----

LOCAL_TURN_FLAGS = (flags.LOCAL, flags.LOCAL_WHEN_LOST, flags.LOCAL_TIME_RATIO, flags.LOCAL_MAX_ITL)
LOCAL_TURNS = {"disaggregation_decode_local_tokens": 512}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
        ({"moe_a2a_backend": "deepep", "deepep_mode": "normal"}, None),
        ({"disaggregation_decode_local_prefill_time_ratio": 1.0}, None),
        ({"disaggregation_decode_local_max_itl_ms": 50.0}, None),
        (
            {
                "disaggregation_decode_local_tokens": 0,
                "disaggregation_decode_fallback_prefill_tokens": 9,
                "disaggregation_decode_local_max_itl_ms": 50.0,
            },
            None,
        ),
        # Without the flag the other settings are not checked.
        ({"disaggregation_decode_enable_radix_cache": False}, flags.FLAG),
        ({"enable_dp_attention": True}, None),
        (
            {"enable_dp_attention": True, "speculative_algorithm": "EAGLE"},
            "--enable-dp-attention with --speculative-algorithm",
        ),
        ({"moe_a2a_backend": "deepep", "enable_two_batch_overlap": True}, None),
        ({"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}, "--deepep-mode low_latency"),
        ({"moe_a2a_backend": "mooncake"}, "--moe-a2a-backend mooncake or nixl"),
        ({"moe_a2a_backend": "nixl"}, "--moe-a2a-backend mooncake or nixl"),
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading"),
        ({"disaggregation_decode_local_tokens": -1}, "not -1"),
        ({"disaggregation_decode_fallback_prefill_tokens": -1}, "not -1"),
        (
            {
                "disaggregation_decode_local_tokens": 0,
                "disaggregation_decode_fallback_prefill_tokens": 9,
                "disaggregation_decode_enable_radix_cache": False,
            },
            "--disaggregation-decode-fallback-prefill-tokens needs",
        ),
        ({"disaggregation_decode_local_prefill_time_ratio": 0.0}, "not 0.0"),
        ({"disaggregation_decode_local_prefill_time_ratio": 1.1}, "not 1.1"),
        ({"disaggregation_decode_local_max_itl_ms": -1.0}, "not -1.0"),
        ({"disaggregation_decode_local_max_itl_ms": math.nan}, "not nan"),
        ({"disaggregation_decode_local_max_itl_ms": math.inf}, "not inf"),
        (
            {
                "disaggregation_decode_local_tokens": 0,
                "disaggregation_decode_local_max_itl_ms": 50.0,
            },
            f"Add {flags.LOCAL} to it",
        ),
    ],
    ids=case_id,
)
def test_settings_of_local_turns(changes, expected):
    """Guards against settings that would stop or break decode at its first local turn; servers
    without the flag are not refused."""
    with refusal(expected) as message:
        check(args(**LOCAL_TURNS | changes))
    assert all(text.startswith(LOCAL_TURN_FLAGS) for text in message)


def test_ranks_that_do_not_gather(monkeypatch):
    """Guards against data-parallel ranks of which one runs a chunk unknown to another."""
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    check(args())
    with refusal("SGLANG_SCHEDULER_SKIP_ALL_GATHER=1"):
        check(args(**LOCAL_TURNS))


@pytest.mark.parametrize(
    ("changes", "is_off"),
    [
        ({"prefill": "trtllm_mla"}, True),
        ({"prefill": "flashinfer"}, True),
        ({"prefill": "fa3"}, False),
        ({"prefill": "fa3", "speculative_draft_attention_backend": "flashinfer"}, True),
        ({"prefill": "flashinfer", "disaggregation_decode_local_tokens": 0}, False),
        ({"prefill": "flashinfer", "disaggregation_mode": "prefill"}, False),
    ],
)
@pytest.mark.hazard("prompts-on-decode")
def test_prefixes_of_local_turns_are_attended_whole(changes, is_off):
    """Guards against a decode server that ends at the first local turn behind a prefix: SGLang's
    attention over latent KV prepares no prefix chunks on a decode server."""
    changes = dict(changes)
    backend = changes.pop("prefill")
    arguments = {
        "disaggregation_mode": "decode",
        "disable_chunked_prefix_cache": False,
        "speculative_draft_attention_backend": None,
        "get_attention_backends": lambda: (backend, "fa3"),
    }
    server = SimpleNamespace(**vars(args()) | LOCAL_TURNS | arguments | changes)
    flags.attend_prefixes_whole(server)
    assert server.disable_chunked_prefix_cache is is_off


# ---- how a setting is written ----


@pytest.mark.parametrize(
    ("setting", "is_given"),
    [
        ("--enable-pdmux", False),
        ("no --enable-pdmux", True),
        ("--deepep-mode auto", True),
        ("--deepep-mode normal", False),
        ("--pipeline-parallel-size above 1", True),
        ("--pipeline-parallel-size above 2", False),
        ("--page-size above 1", False),  # SGLang decides
        (flags.LOCAL_WHEN_LOST, True),
        ("--deepep-mode auto with --enable-pdmux", False),
        ("--deepep-mode auto without --enable-pdmux with no --enable-lmcache", True),
    ],
)
def test_a_setting_is_read_as_a_user_writes_it(setting, is_given):
    """Guards against a row that refuses a setting that was not given, or accepts one that was."""
    server = args(pp_size=2, disaggregation_decode_fallback_prefill_tokens=9)
    assert flags.is_given(server, setting) is is_given
