"""The flag on SGLang's real ``ServerArgs``: command line, constructor, and the stock behaviour."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pickle

import pytest

from sglang.srt.patchset import compat
from sglang.srt.server_args import ServerArgs, prepare_server_args

FIELD = "disaggregation_decode_enable_radix_cache"
CHUNK_CACHE_WARNING = "KV cache is forced as chunk cache for decode server"
DECODE = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl"}
CPU = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_piecewise_cuda_graph": True,
}


def test_decode_server_keeps_its_tree(model_config, caplog):
    """The point of the flag; and the log must not claim the opposite."""
    with caplog.at_level(logging.WARNING):
        args = ServerArgs(model_path=model_config(), **DECODE, **CPU, **{FIELD: True})
    assert args.disable_radix_cache is False
    assert CHUNK_CACHE_WARNING not in caplog.text


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_without_the_flag_all_is_stock(model_config, caplog, mode):
    """A server that passes no flag of ours must come out exactly as SGLang makes it."""
    kwargs = {"disaggregation_mode": mode, "disaggregation_transfer_backend": "nixl", **CPU}
    path = model_config()
    (stock_class,) = [c for c in ServerArgs.__mro__[1:] if c.__name__ == "ServerArgs"]
    with caplog.at_level(logging.WARNING):
        stock = stock_class(model_path=path, random_seed=1, **kwargs)
        expected = caplog.messages[:]
        caplog.clear()
        patched = ServerArgs(model_path=path, random_seed=1, **kwargs)
    assert caplog.messages == expected
    assert (CHUNK_CACHE_WARNING in expected) == (mode == "decode")
    values = {f.name: getattr(patched, f.name) for f in dataclasses.fields(patched)}
    for field in dataclasses.fields(stock):
        assert values.pop(field.name) == getattr(stock, field.name), field.name
    assert values[FIELD] is False


@pytest.mark.parametrize("flag", [{}, {FIELD: True}], ids=["without our flag", "with it"])
def test_fp4_is_refused_on_both_servers(flag):
    """SGLang starts such a pair, and its answers are wrong."""
    modes = ["decode"] if flag else ["prefill", "decode"]
    for mode in modes:
        changes = {"disaggregation_mode": mode, "kv_cache_dtype": "fp4_e2m1"}
        with pytest.raises(ValueError, match="--kv-cache-dtype fp4_e2m1"):
            ServerArgs(**{"model_path": "dummy", **CPU, **DECODE, **flag, **changes})


def test_command_line():
    """The stock entry points build their parser through ``ServerArgs.add_cli_args``."""
    line = ["--model-path", "dummy", "--disaggregation-mode", "decode"]
    line += ["--disaggregation-transfer-backend", "nixl"]
    assert getattr(prepare_server_args(line), FIELD) is False
    assert getattr(prepare_server_args([*line, compat.FLAG]), FIELD) is True
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert compat.FLAG in parser.format_help()


@pytest.mark.parametrize(
    ("field", "value", "forms"),
    [
        (
            "disaggregation_decode_local_tokens_when_lost",
            9,
            [
                "--disaggregation-decode-fallback-prefill-tokens",
                "--disaggregation-decode-local-tokens-when-lost",
            ],
        ),
        (
            "disaggregation_decode_local_share",
            0.25,
            [
                "--disaggregation-decode-local-prefill-time-ratio",
                "--disaggregation-decode-local-share",
            ],
        ),
    ],
)
def test_both_names_of_a_flag(field, value, forms):
    """Guards against a command line that no longer starts, and a refusal that names no flag."""
    line = ["--model-path", "dummy", "--disaggregation-mode", "decode"]
    line += ["--disaggregation-transfer-backend", "nixl", compat.FLAG]
    for form in forms:
        assert getattr(prepare_server_args([*line, form, str(value)]), field) == value
    with pytest.raises(ValueError, match=f"^{forms[0]} must be"):
        prepare_server_args([*line, forms[1], "-1"])


def test_field_order_and_pickle():
    """Upstream's positional order stays, and spawned processes get the flag."""
    (stock_class,) = [c for c in ServerArgs.__mro__[1:] if c.__name__ == "ServerArgs"]
    names = [f.name for f in dataclasses.fields(ServerArgs)]
    assert names[: len(dataclasses.fields(stock_class))] == [
        f.name for f in dataclasses.fields(stock_class)
    ]
    args = ServerArgs(model_path="dummy", **DECODE, **{FIELD: True})
    copy = pickle.loads(pickle.dumps(args))
    assert type(copy) is ServerArgs and getattr(copy, FIELD) is True
    assert getattr(dataclasses.replace(args, host="0.0.0.0"), FIELD) is True


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"disaggregation_mode": "null"}, "--disaggregation-mode"),
        ({"disaggregation_transfer_backend": "fake"}, "--disaggregation-transfer-backend"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"pp_size": 2}, "--pipeline-parallel-size"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dummy", [True, False])
def test_refusals_reach_the_user(model_config, changes, named, dummy):
    """Through the real class, also on the short way that SGLang takes for dummy models."""
    path = "dummy" if dummy else model_config()
    with pytest.raises(ValueError, match=compat.FLAG) as error:
        ServerArgs(**{"model_path": path, **CPU, **DECODE, FIELD: True, **changes})
    assert named in str(error.value)


def test_checks_what_sglang_filled_in(model_config):
    """The page size is chosen inside SGLang's handlers; the reserve must be checked against it."""
    with pytest.raises(ValueError, match="--num-reserved-decode-tokens"):
        ServerArgs(
            model_path=model_config(),
            page_size=64,
            num_reserved_decode_tokens=63,
            **CPU,
            **DECODE,
            **{FIELD: True},
        )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "sliding-window",
        ),
        (
            {
                "architectures": ["FalconH1ForCausalLM"],
                "model_type": "falcon_h1",
                "mamba_d_ssm": 64,
                "mamba_n_heads": 4,
                "mamba_d_head": 16,
            },
            "state-space",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)
def test_models_are_refused_before_their_weights(model_config, changes, named):
    """From the configuration alone: no weights are there in this test."""
    with pytest.raises(ValueError, match=named) as error:
        ServerArgs(model_path=model_config(**changes), **CPU, **DECODE, **{FIELD: True})
    assert compat.FLAG in str(error.value)
