"""The plugin loader of a real SGLang 0.5.23 attaches the group ``lead``, if it is configured."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # Any: values of arguments

import msgspec
import pytest
from transformers import PretrainedConfig

from current import arguments
from current.decode import Decode
from current.prefill import Prefill
from sglang.srt.arg_groups.validation_hook import check_server_args
from sglang.srt.disaggregation import lead
from sglang.srt.disaggregation.lead import attach, settings
from sglang.srt.patchset.__main__ import NAME, PLUGINS
from sglang.srt.plugins import load_plugins_by_group
from sglang.srt.server_args import ServerArgs, prepare_server_args
from unit.patchset.conftest import clean_environment

HERE = Path(lead.__path__[0])


@pytest.mark.server()
def test_sglang_finds_the_plugin(decode: Decode) -> None:
    """Guards against an entry point that the loader of this release does not find."""
    function, _ = load_plugins_by_group(PLUGINS)[NAME]
    assert function is attach.activate


@pytest.mark.server()
def test_with_nothing_set_no_method_differs(decode: Decode) -> None:
    """Guards against a part, other than flags and report, that is on because the package is
    installed. SGLang has loaded its plugins in this server."""
    assert attach.attached == ["flags", "identity"]
    wrapped: list[tuple[type, str]] = []

    def note(owner: type, name: str, signature: str) -> Callable[[object], object]:
        wrapped.append((owner, name))
        return lambda wrapper: wrapper

    flags, *others, reporter = (
        importlib.import_module(f"{attach.__package__}.{part.name}") for part in attach.PARTS
    )
    reporter.install(note)
    flags.install(note)
    ours, wrapped = wrapped, []
    for part in others:
        part.install(note)
    for owner, name in (*ours, *wrapped):
        method = getattr(owner, name)
        if (owner, name) in ours:
            method = inspect.unwrap(method)
        assert not Path(method.__code__.co_filename).is_relative_to(HERE), f"{owner}.{name}"


@pytest.mark.server()
def test_every_part_fits_this_release() -> None:
    """Guards against a method of SGLang that does not fit a part, by the report of ``--check``; and
    against a check that fails without a GPU driver, as in the build of an image."""
    check = [sys.executable, "-m", "sglang.srt.patchset", "--check"]
    done = subprocess.run(check, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


DECODE = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
PAIR = {"disaggregation_transfer_backend": "nixl"}
MODEL = SimpleNamespace(
    attention_arch=SimpleNamespace(name="MHA"),
    is_hybrid_swa=False,
    linear_attn_registry_result=None,
    hf_config=PretrainedConfig(architectures=["Qwen3ForCausalLM"]),
)


def field(setting: str) -> str:
    """Return the name of the argument in a row of ``settings``."""
    flag = setting.removeprefix("no ").removeprefix("another ").split()[0]
    return flag.removeprefix("--").replace("-", "_")


def matching_value(setting: str) -> Any:
    """Return a value of the argument that is refused by this row."""
    if setting.startswith("no "):
        return False
    _, _, value = setting.removeprefix("another ").partition(" ")
    return {"than": "another", "above": 2, "": True}.get(value.split(" ")[0], value)


def reasons(mode: str, config: Any = MODEL, **changes: Any) -> list[str]:
    """Return the refusals of a server with these arguments and SGLang's defaults."""
    fields = {spec.name: spec.default for spec in msgspec.structs.fields(ServerArgs)}
    values = fields | PAIR | (DECODE if mode == "decode" else {"disaggregation_mode": mode})
    return list(settings.refused(SimpleNamespace(**values | changes), config))


@pytest.mark.server()
def test_each_argument_of_this_release_has_a_verdict() -> None:
    """Guards against an argument that is new in a release and that no part was run with."""
    rows = settings.ON_BOTH | settings.ON_DECODE
    names = [*{field(setting) for setting in rows if setting.startswith(("--", "no ", "another "))}]
    verdicts = arguments.WORKS | arguments.CANNOT_MATTER
    for text in (arguments.WITH_A_MODEL, *verdicts.values()):
        names += text.split()
    assert sorted(names) == sorted(ServerArgs.__struct_fields__)


@pytest.mark.server()
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_each_row_is_refused_on_its_side(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Guards against a server that starts with an untested setting (other pools, other batches, a
    prefill server that releases no rooms), and against a row that refuses every server."""
    assert reasons(mode) == []
    for setting, why in (settings.ON_BOTH | settings.ON_DECODE).items():
        with monkeypatch.context() as patch:
            if setting.startswith("SGLANG_"):
                patch.setenv(setting.removesuffix("=1"), "1")
            is_here = mode == "decode" or setting in settings.ON_BOTH
            refusals = reasons(mode, **{field(setting): matching_value(setting)})
            assert refusals == [f"{setting}: {why}"] * is_here, setting


@pytest.mark.server()
def test_models_of_other_kinds_are_refused() -> None:
    """Guards against pools beside the KV, and (MLA) against a chunk behind a long prefix, which
    SGLang does not support on a decode server."""
    window = {"is_hybrid_swa": True, "is_deepseek_v4_arch": True}
    hf = PretrainedConfig(architectures=["MiniMaxM3SparseForCausalLM"])
    registered = SimpleNamespace(config=True)
    kinds = {
        settings.WINDOWS: window,
        settings.SPARSE: {"hf_config": hf},
        settings.STATES: {"linear_attn_registry_result": (registered, registered)},
    }
    for kind, changes in kinds.items():
        model = SimpleNamespace(**vars(MODEL) | changes)
        for mode in ("prefill", "decode"):
            assert reasons(mode, model) == [f"{kind}: {settings.OTHER_POOLS}"]
    states = {"mamba_radix_cache_strategy": "no_buffer"}
    assert reasons("decode", model, **states) == []
    assert reasons("decode", model, **states, enable_linear_replayssm=True)
    drafts = {"speculative_algorithm": "EAGLE"}
    parallel, replayed = (
        {"attn_dp_size": 2, "cuda_graph_config": SimpleNamespace(prefill=phase)}
        for phase in (SimpleNamespace(backend="disabled"), SimpleNamespace(backend="breakable"))
    )
    assert reasons("decode", **parallel) == reasons("decode", **drafts) == []
    assert reasons("decode", **parallel, **drafts) == [settings.DRAFTS]
    assert reasons("decode", **replayed) == [settings.GRAPHS]
    latent = SimpleNamespace(**vars(MODEL) | {"attention_arch": SimpleNamespace(name="MLA")})
    backend = {"attention_backend": "flashinfer"}
    assert reasons("decode", latent, **backend) == [settings.MLA]
    assert reasons("decode", latent, disable_chunked_prefix_cache=True, **backend) == []
    assert reasons("decode", latent) == reasons("prefill", latent, **backend) == []


@pytest.mark.server()
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dwdp-size 2 --tp-size 2", "requires --disaggregation-mode null or prefill"),
        ("--elastic-ep-join-mode recover", "requires --elastic-ep-backend"),
        ("--enable-hisparse", "enable-radix-cache is incompatible with --enable-hisparse"),
        ("--enable-kv-cache-sharding", "only supported on PD prefill"),
        ("--enable-lmcache", "colocated prefill/decode scheduling only"),
        ("--enable-page-major-kv-layout", "without --enable-unified-memory"),
        ("--enable-watermark --device cuda", "not supported with PD disaggregation"),
        ("--moe-dp-size 2 --tp-size 2", "attn_cp_size != moe_dp_size"),
        (
            "--enable-pdmux --chunked-prefill-size -1 --disable-overlap-schedule",
            "not compatible with disaggregation mode",
        ),
        (
            "--disaggregation-decode-allocation-policy prefill_complete "
            "--disaggregation-transfer-backend mooncake",
            "does not yet support decode radix cache",
        ),
    ],
)
def test_sglang_itself_refuses(model: str, arguments: str, message: str) -> None:
    """Guards against a setting without a row that a later release allows."""
    where = "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"
    radix = "--disaggregation-decode-enable-radix-cache"
    line = ["--model-path", model, "--device", "cpu", *where, radix, *arguments.split()]
    with pytest.raises((ValueError, AssertionError, NotImplementedError), match=message):
        args = prepare_server_args(line)
        args.resolve_once()
        check_server_args(args)


LOCAL = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "512"}


@pytest.mark.server(mode="prefill", env=LOCAL)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (("--use-ray",), "--use-ray: "),
        (("--enable-pd-role-switch",), "--enable-pd-role-switch: "),
        (("--disaggregation-transfer-backend", "mori"), "than nixl, mooncake: "),
    ],
)
def test_a_server_is_refused_before_it_starts_a_process(
    prefill: Prefill, model: str, flag: tuple[str, ...], message: str
) -> None:
    """Guards against an error as late as the loading of weights, and (Ray) against processes in
    which SGLang loads no plugin. SGLang resolves arguments first, and again in each process."""
    where = "--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl"
    args = prepare_server_args(["--model-path", model, "--device", "cpu", *where, *flag])
    with pytest.raises(ValueError, match="LOCAL_TOKENS=512 cannot be combined with") as error:
        args.resolve_once()
    assert message in str(error.value)
