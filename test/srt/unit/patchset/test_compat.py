"""What the decode radix flag refuses, and that every refusal says what to do instead."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest

from sglang.srt.patchset import compat


def args(**changes):
    """Server arguments of a decode server that may use the flag."""
    accepted = {
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
        "num_reserved_decode_tokens": 512,
        "page_size": None,
    }
    assert changes.keys() <= accepted.keys()
    return SimpleNamespace(**accepted | changes)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name, _ in compat._EXCLUSIVE_ENV:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 512])
def test_accepted(page_size, backend):
    """The plain case, before and after SGLang has chosen a page size; a backend that sends deltas
    must not be refused."""
    compat.check_decode_radix_args(
        args(page_size=page_size, disaggregation_transfer_backend=backend)
    )


@pytest.mark.hazard("offload-manager", "receivers-without-prefix", "radix-beside-hicache")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode is prefill"),
        ({"disaggregation_mode": "null"}, "--disaggregation-mode is null"),
        *(
            ({"disaggregation_transfer_backend": b}, f"--disaggregation-transfer-backend {b}")
            for b in ("mori", "ascend", "fake")
        ),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        *(
            ({"speculative_algorithm": name}, f"--speculative-algorithm {name}")
            for name in ("STANDALONE", "NGRAM", "LATER")
        ),
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
        ({"page_size": 16, "num_reserved_decode_tokens": 15}, "--num-reserved-decode-tokens (15)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "model",
)
def test_refused(changes, named):
    """Accepted silently, each of these corrupts KV or ends the server at its first request."""
    with pytest.raises(ValueError) as error:
        compat.check_decode_radix_args(args(**changes))
    message = str(error.value)
    assert message.startswith(compat.FLAG) and named in message
    assert any(way in message for way in ("Use ", "Remove one", "Give it to"))


@pytest.mark.parametrize(
    ("mode", "backend", "dtype", "refused"),
    [
        ("prefill", "nixl", "fp4_e2m1", True),
        ("decode", "mooncake", "fp4_e2m1", True),
        ("decode", "nixl", "fp8_e4m3", False),
        ("null", "nixl", "fp4_e2m1", False),
        ("prefill", "ascend", "fp4_e2m1", False),
    ],
)
def test_kv_that_a_pair_does_not_transfer_whole(mode, backend, dtype, refused):
    """Without a flag too: decode read keys without their scales, and of multi-head attention what
    was sent overwrote memory of others."""
    server = args(
        disaggregation_mode=mode, disaggregation_transfer_backend=backend, kv_cache_dtype=dtype
    )
    if not refused:
        compat.check_transferable(server)
        return
    with pytest.raises(ValueError) as error:
        compat.check_transferable(server)
    named = f"--disaggregation-mode {mode}", "--kv-cache-dtype fp4_e2m1", "Use --kv-cache-dtype"
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize("topk", [None, 1])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "NEXTN"])
def test_chains_of_drafts_are_accepted(algorithm, topk):
    """NEXTN is what the user writes, and EAGLE what SGLang makes of it; the number of drafts may be
    left to SGLang."""
    compat.check_decode_radix_args(
        args(speculative_algorithm=algorithm, speculative_eagle_topk=topk)
    )


@pytest.mark.parametrize(
    ("drafts", "v2", "refused"), [(8, "1", False), (9, "1", True), (9, "0", False)]
)
def test_drafts_that_a_row_has_no_room_for(monkeypatch, drafts, v2, refused):
    """With spec v2 a request holds slots of two steps ahead of its text, and a row has room for 8
    tokens and one step behind the longest text."""
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", v2)
    long = args(speculative_algorithm="EAGLE", speculative_num_draft_tokens=drafts)
    if not refused:
        return compat.check_decode_radix_args(long)
    with pytest.raises(ValueError, match="SGLANG_ENABLE_SPEC_V2=1 with 9 draft tokens"):
        compat.check_decode_radix_args(long)


@pytest.mark.parametrize(
    "name", ["SGLANG_DISAGG_STAGING_BUFFER", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"]
)
@pytest.mark.parametrize(
    ("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)]
)
def test_environment_settings(monkeypatch, name, value, refused):
    """Two of SGLang's switches are environment variables; they conflict just the same."""
    monkeypatch.setenv(name, value)
    if not refused:
        return compat.check_decode_radix_args(args())
    with pytest.raises(ValueError, match=f"{compat.FLAG} cannot be combined with {name}=1"):
        compat.check_decode_radix_args(args())


@pytest.mark.hazard("flag-ineffective")
@pytest.mark.parametrize("check", [compat.check_explicit_disable, compat.check_still_enabled])
def test_a_tree_that_is_off(check):
    """Asking for both is a mistake: neither may win silently. And SGLang disables the tree for some
    models with only a log line, which must not go unseen."""
    check(args())
    with pytest.raises(ValueError, match=f"{compat.FLAG} .* --disable-radix-cache"):
        check(args(disable_radix_cache=True))


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"disaggregation_mode": "decode"}, False),
        ({"enable_hierarchical_cache": False}, False),
        ({"speculative_algorithm": None}, False),
    ],
)
def test_drafts_behind_hicache_are_warned_of(caplog, changes, warned):
    """Drafts that are rejected behind what prefill loaded, and nobody knows why."""
    given = {
        "disaggregation_mode": "prefill",
        "enable_hierarchical_cache": True,
        "speculative_algorithm": "EAGLE",
    }
    compat.warn_drafts_behind_hicache(args(**given | changes))
    assert ("fewer drafts are accepted" in caplog.text) == warned


@pytest.mark.parametrize(("enabled", "warnings"), [(True, 1), (False, 0)])
def test_dp_attention_warns(caplog, enabled, warnings):
    """It works, but without a prefix-aware router it never hits: the user has to know."""
    with caplog.at_level(logging.WARNING):
        compat.warn_dp_attention(args(enable_dp_attention=enabled))
    assert len(caplog.records) == warnings
    assert all("--enable-dp-attention" in record.getMessage() for record in caplog.records)


class StateSpaceConfig:
    """As SGLang's configurations of models with state layers."""

    @property
    def mamba2_cache_params(self):
        """Must not be computed by a mere check."""
        raise AssertionError


def model(hf_config=None, **changes):
    """A model configuration with plain attention."""
    plain = SimpleNamespace(index_topk=None, sliding_window=4096)
    return SimpleNamespace(
        model_path="m", hf_config=hf_config or plain, hf_text_config=plain, **changes
    )


@pytest.mark.hazard("state-beyond-prefix", "unfit-models")
@pytest.mark.parametrize(
    ("config", "named"),
    [
        (model(is_hybrid_swa=True), "sliding-window"),
        (model(StateSpaceConfig()), "state-space"),
        (model(is_multimodal=True, model_impl="transformers"), "--model-impl transformers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "model",
)
def test_refused_models(config, named):
    """Their KV is more than one pool of pages; found later, after the weights, it costs minutes."""
    with pytest.raises(ValueError, match=named) as error:
        compat.check_decode_radix_model(config)
    assert compat.FLAG in str(error.value) and "--model-path" in str(error.value)


SPARSE = model(SimpleNamespace(index_topk=2048))


@pytest.mark.parametrize(
    "config",
    [model(), model(is_multimodal=True, model_impl="auto"), model(is_hybrid_swa=False), SPARSE],
)
def test_accepted_models(config):
    """A window in the configuration alone says nothing about the pool."""
    compat.check_decode_radix_model(config)


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_a_draft_model_beside_a_sparse_index(algorithm):
    """SGLang sends no index of a draft model: found later, when its pool is there, it costs
    minutes."""
    compat.check_decode_radix_model(model(), algorithm)
    with pytest.raises(ValueError, match=f"--speculative-algorithm {algorithm}") as error:
        compat.check_decode_radix_model(SPARSE, algorithm)
    assert compat.FLAG in str(error.value)


LOCAL_TURN_FLAGS = (compat.LOCAL, compat.LOCAL_WHEN_LOST, compat.LOCAL_SHARE, compat.LOCAL_MAX_ITL)
LOCAL_TURNS = {
    "disaggregation_decode_local_tokens": 512,
    "disaggregation_decode_local_tokens_when_lost": 0,
    "disaggregation_decode_local_share": 0.5,
    "disaggregation_decode_local_max_itl_ms": 0.0,
    "disaggregation_decode_enable_radix_cache": True,
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "moe_a2a_backend": "none",
    "deepep_mode": "auto",
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_lora_overlap_loading": None,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"disaggregation_decode_enable_radix_cache": False}, compat.FLAG),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"moe_a2a_backend": "deepep", "deepep_mode": "low_latency"}, "--deepep-mode low_latency"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"enable_lora_overlap_loading": True}, "--enable-lora-overlap-loading"),
        ({"disaggregation_decode_local_tokens": -1}, "not -1"),
        ({"disaggregation_decode_local_tokens_when_lost": -1}, "not -1"),
        (
            {
                "disaggregation_decode_local_tokens": 0,
                "disaggregation_decode_local_tokens_when_lost": 9,
                "disaggregation_decode_enable_radix_cache": False,
            },
            "--disaggregation-decode-fallback-prefill-tokens needs",
        ),
        ({"disaggregation_decode_local_share": 0.0}, "not 0.0"),
        ({"disaggregation_decode_local_share": 1.1}, "not 1.1"),
        ({"disaggregation_decode_local_max_itl_ms": -1.0}, "not -1.0"),
        ({"disaggregation_decode_local_max_itl_ms": math.nan}, "not nan"),
        ({"disaggregation_decode_local_max_itl_ms": math.inf}, "not inf"),
        (
            {
                "disaggregation_decode_local_tokens": 0,
                "disaggregation_decode_local_max_itl_ms": 50.0,
            },
            f"Add {compat.LOCAL} to it",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_local_turns_refused(changes, named):
    """Accepted silently, each of these would stop or break decode at its first local turn."""
    with pytest.raises(ValueError) as error:
        compat.check_local_turns(SimpleNamespace(**LOCAL_TURNS | changes))
    assert str(error.value).startswith(LOCAL_TURN_FLAGS) and named in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"speculative_algorithm": "EAGLE"},
        {"moe_a2a_backend": "deepep", "deepep_mode": "normal"},
        {"disaggregation_decode_local_share": 1.0},
        {"disaggregation_decode_local_max_itl_ms": 50.0},
        {
            "disaggregation_decode_local_tokens": 0,
            "disaggregation_decode_local_tokens_when_lost": 9,
            "disaggregation_decode_local_max_itl_ms": 50.0,
        },
        # Without the flag nothing is asked of the rest.
        {"disaggregation_decode_local_tokens": 0, "enable_dp_attention": True},
    ],
)
def test_local_turns_accepted(changes):
    """Guards against a check that refuses servers without the flag."""
    compat.check_local_turns(SimpleNamespace(**LOCAL_TURNS | changes))


@pytest.mark.parametrize(
    ("changes", "off"),
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
def test_prefixes_of_local_turns_are_attended_whole(changes, off):
    """Guards against a decode server that ends at the first local turn behind a prefix: SGLang's
    attention of latent KV prepares nothing for chunks of a prefix on a decode server."""
    changes = dict(changes)
    backend = changes.pop("prefill")
    given = {
        "disaggregation_mode": "decode",
        "disable_chunked_prefix_cache": False,
        "speculative_draft_attention_backend": None,
        "get_attention_backends": lambda: (backend, "fa3"),
    }
    args = SimpleNamespace(**LOCAL_TURNS | given | changes)
    compat.attend_prefixes_whole(args)
    assert args.disable_chunked_prefix_cache is off
