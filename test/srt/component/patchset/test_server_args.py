"""The flags on SGLang's real ``ServerArgs``: command line, constructor, and stock behaviour."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import model_runner_kv_cache_mixin
from sglang.srt.patchset import flags, refusals
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
    """Guards against a flag without effect, and against a log that claims the opposite."""
    with caplog.at_level(logging.WARNING):
        args = ServerArgs(model_path=model_config(), **DECODE, **CPU, **{FIELD: True})
    assert args.disable_radix_cache is False
    assert CHUNK_CACHE_WARNING not in caplog.text


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
def test_without_the_flag_arguments_are_stock(model_config, caplog, mode):
    """Guards against changed arguments or warnings on a server without a flag of the package."""
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


@pytest.mark.parametrize("mode", ["null", "prefill", "decode"])
@pytest.mark.parametrize("value", ["0", "soon"])
def test_a_wrong_variable_is_refused_on_every_server(monkeypatch, mode, value):
    """Guards against an invalid value that is refused on decode only, or only when it is read."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT", value)
    with pytest.raises(ValueError, match="HANDSHAKE_TIMEOUT must be a number of seconds from 0.1"):
        ServerArgs(model_path="dummy", disaggregation_mode=mode, **CPU)


def test_each_setting_of_a_refusal_can_be_given():
    """Guards against a row that refuses nothing because SGLang has no such setting."""
    rows = (*refusals.ALWAYS, *refusals.AS_GIVEN, *refusals.FILLED_IN, *refusals.WARNED)
    written = (when for row in rows if isinstance(when := row.when or row.other, str))
    settings = {part for when in written for part in flags.parts_of(when)}
    settings.update(flag for row in rows for flag in row.flags)
    names = {
        setting.removeprefix("no ").removeprefix("another ").split()[0].removesuffix("=1")
        for setting in settings
    }
    variables = {name for name in names if name.startswith("SGLANG_")}
    attributes = {flags.FIELDS.get(n, n[2:].replace("-", "_")) for n in names - variables}
    assert attributes <= {field.name for field in dataclasses.fields(ServerArgs)}
    assert all(hasattr(envs, name) for name in variables) and len(variables) == 4


LINE = [
    *("--model-path", "dummy", "--disaggregation-mode", "decode"),
    *("--disaggregation-transfer-backend", "nixl"),
]


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        (FIELD, True, flags.FLAG),
        ("disaggregation_decode_fallback_prefill_tokens", 9, flags.LOCAL_WHEN_LOST),
        ("disaggregation_decode_local_prefill_time_ratio", 0.25, flags.LOCAL_TIME_RATIO),
    ],
)
def test_a_flag_by_its_name(field, value, flag):
    """Guards against a command line that no longer starts, a flag without help, and a refusal
    without the flag's name."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert getattr(prepare_server_args(LINE), field) != value and flag in parser.format_help()
    number = [] if value is True else [str(value)]
    assert getattr(prepare_server_args([*LINE, flags.FLAG, flag, *number]), field) == value
    if number:
        with pytest.raises(ValueError, match=f"^{flag} must be"):
            prepare_server_args([*LINE, flags.FLAG, flag, "-1"])


def test_field_order_and_pickle():
    """Guards against a changed positional order, and against spawned processes without the flag."""
    (stock_class,) = [c for c in ServerArgs.__mro__[1:] if c.__name__ == "ServerArgs"]
    names = [f.name for f in dataclasses.fields(ServerArgs)]
    assert names[: len(dataclasses.fields(stock_class))] == [
        f.name for f in dataclasses.fields(stock_class)
    ]
    args = ServerArgs(model_path="dummy", **DECODE, **{FIELD: True})
    copy = pickle.loads(pickle.dumps(args))
    assert type(copy) is ServerArgs and getattr(copy, FIELD) is True
    assert getattr(dataclasses.replace(args, host="0.0.0.0"), FIELD) is True


SLIDING = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"],
}
STATE_SPACE = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
}
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]},
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
FP4 = {"kv_cache_dtype": "fp4_e2m1"}


@pytest.mark.parametrize(
    ("model", "changes", "named"),
    [
        # ``dummy``: SGLang handles such models in a shorter way.
        *(
            (model, changes, named)
            for model in ("dummy", {})
            for changes, named in (
                ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
                ({"disaggregation_transfer_backend": "fake"}, "--disaggregation-transfer-backend"),
                ({"disable_radix_cache": True}, "--disable-radix-cache"),
                ({"speculative_algorithm": "STANDALONE"}, "--speculative-algorithm"),
                ({"pp_size": 2}, "--pipeline-parallel-size"),
            )
        ),
        # SGLang starts such a pair, and its answers are wrong, with or without the flag.
        ("dummy", FP4, "--kv-cache-dtype fp4_e2m1"),
        ("dummy", FP4 | {FIELD: False}, "--kv-cache-dtype fp4_e2m1"),
        (
            "dummy",
            FP4 | {FIELD: False, "disaggregation_mode": "prefill"},
            "--kv-cache-dtype fp4_e2m1",
        ),
        # The page size is chosen inside SGLang's handlers.
        ({}, {"page_size": 64, "num_reserved_decode_tokens": 63}, "--num-reserved-decode-tokens"),
        # From the configuration alone: there are no weights here.
        (SLIDING, {}, "Add --disable-hybrid-swa-memory, in a pair to both"),
        (STATE_SPACE, {"disaggregation_decode_local_tokens": 8}, "no recurrent state"),
        (STATE_SPACE, {"mamba_scheduler_strategy": "extra_buffer"}, "extra_buffer"),
    ],
    ids=str,
)
def test_refusals_reach_the_user(model_config, model, changes, named):
    """Guards against a refusal that SGLang's class skips, or that comes after the weights."""
    path = model if model == "dummy" else model_config(**model)
    with pytest.raises(ValueError, match=named):
        ServerArgs(**{"model_path": path, **CPU, **DECODE, FIELD: True, **changes})


@pytest.mark.parametrize("model", [STATE_SPACE, KIMI], ids=["falcon_h1", "kimi_linear"])
@pytest.mark.parametrize("flag", [True, False])
def test_recurrent_state_turns_overlap_off(model_config, model, flag):
    """Guards against a step in flight that puts the last token of a retracted request into its
    state, and against a changed server without the flag. For some of these models SGLang has no
    tree with states and turns the tree off; decode's tree has no states."""
    settings = {"model_path": model_config(**model), **CPU, **DECODE, FIELD: flag}
    args = ServerArgs(**settings, disable_overlap_schedule=False)
    stock = model is KIMI and not flag
    assert args.disable_radix_cache is not flag
    assert args.disable_overlap_schedule is not stock


@pytest.mark.parametrize(
    ("full", "windows", "less"), [(12, 12, 0.10), (18, 18, 0.10), (12, 36, 0.15), (12, 33, 0.14667)]
)
def test_the_cost_of_one_pool_for_all_layers(full, windows, less, monkeypatch):
    """Guards the numbers of the docs and of the refusal against SGLang's own division of memory
    into a pool for full attention and one for windows: gpt-oss-20b and -120b, Llama 4 and
    Step-3.5."""
    mixin = model_runner_kv_cache_mixin
    monkeypatch.setattr(mixin, "get_attention_tp_size", lambda: 1)
    runner = SimpleNamespace(
        server_args=ServerArgs(model_path="dummy", page_size=1, **CPU),
        sliding_window_size=128,
        kv_cache_dtype=torch.bfloat16,
        model_config=SimpleNamespace(
            full_attention_layer_ids=range(full),
            swa_attention_layer_ids=range(windows),
            get_num_kv_heads=lambda size: 8,
            get_swa_num_kv_heads=lambda size: 8,
            head_dim=64,
            v_head_dim=64,
            swa_head_dim=64,
            swa_v_head_dim=64,
        ),
    )
    one_pool = 1_000_000
    tokens, *_ = mixin.ModelRunnerKVCacheMixin._resolve_hybrid_swa_tokens(runner, one_pool)
    assert one_pool / tokens == pytest.approx(1 - less, abs=1e-5)


@pytest.mark.parametrize(("heads", "value_dim"), [(4, 128), (8, 192)])
def test_one_pool_does_not_fit_mimo_v2(heads, value_dim):
    """Guards the docs: MiMo-V2's values are shorter than its keys, and its Flash has more KV heads
    in layers with a window, but SGLang's one pool has full attention's heads and one width."""
    pool = MHATokenToKVPool(8, 1, torch.float32, 4, 192, 1, "cpu", False)
    key, value = torch.ones(3, heads, 192), torch.ones(3, heads, value_dim)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), torch.arange(3), key, value)


def test_sglang_refuses_pdmux_in_a_pair():
    """Guards a setting that local turns do not refuse because SGLang does: its own scheduler loop
    would never run their chunks."""
    args = ServerArgs(
        model_path="dummy",
        disaggregation_mode="decode",
        chunked_prefill_size=-1,
        enable_pdmux=True,
        served_model_name="dummy",
        **CPU,
    )
    with pytest.raises(AssertionError, match="not compatible with disaggregation mode"):
        args.check_server_args()
