"""Keys in the store: equal for servers that compute the same bytes, different for all others."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only import namespaces
from sglang.srt.mem_cache.buffer_only.namespaces import (
    Namespace,
    fingerprint,
    model_identity,
    pool_identity,
)

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
SERVER = Namespace.of({"model": "one"})


@pytest.mark.hazard("tenants-meet-in-store")
@given(st.text(st.characters()), st.text(st.characters()))
@example("\ud800", "\udc00")
@example("\ud800\udc00", "\U00010000")
def test_namespaces_are_disjoint(first: str, second: str):
    """Guards tenants, adapters and salts with the same tokens; also without any, where SGLang's own
    keys may be those of a stock server's adapters. A text may have lone surrogates, as JSON can."""
    first_keys, second_keys = (set(SERVER.within(name).keys(HASHES)) for name in (first, second))
    assert len(first_keys) == len(HASHES) and not first_keys & set(HASHES)
    assert first_keys == second_keys if first == second else not first_keys & second_keys
    assert not first_keys & set(Namespace.of({"model": "two"}).within(first).keys(HASHES))


def test_keys_do_not_depend_on_the_process():
    """Another process, with other node boundaries, must find the keys that this one wrote."""
    keys = SERVER.keys(HASHES)
    assert keys == SERVER.keys(HASHES[:1]) + SERVER.keys(HASHES[1:])
    assert keys == Namespace.of({"model": "one"}).within(None).keys(HASHES)
    assert Namespace.of({"a": 1, "b": [2]}) == Namespace.of({"b": [2], "a": 1})


# ---- weights ----


def model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3, bias=False))


def one_bit(index: int) -> torch.nn.Module:
    """Return a model that was edited in one place."""
    edited = model()
    edited[0].weight.data.view(-1).view(torch.int32)[index] ^= 1
    return edited


def swapped(index: int) -> torch.nn.Module:
    """Return a model with two elements swapped."""
    edited = model()
    flat = edited[0].weight.data.view(-1)
    flat[index], flat[index - 1] = flat[index - 1].clone(), flat[index].clone()
    return edited


def with_scale() -> torch.nn.Module:
    """Return a model with a scale of quantized KV, which SGLang's attention keeps as a plain
    attribute."""
    edited = model()
    edited[0].k_scale_float = 0.5
    return edited


def test_two_models_never_meet():
    """Guards models of one shape against each other. The same files in other folders on other hosts
    share keys."""
    models = [model(2), model().half(), model().bfloat16(), with_scale(), model()]
    models += [change(index) for change in (one_bit, swapped) for index in (0, 1, 30, 63)]
    assert fingerprint(model()) == fingerprint(model())
    assert len(set(map(fingerprint, models))) == len(models)


def test_keys_are_those_of_configuration_and_all_ranks_weights():
    """Two models of one shape behind one store would read each other's pages."""
    config = {"rope_theta": 1e4}
    same = [model_identity(dict(config), iter(["a", "b"])) for _ in range(2)]
    others = [
        model_identity({"rope_theta": 1e6}, ["a", "b"]),
        *(model_identity(config, weights) for weights in (["a", "c"], ["b", "a"], ["a"])),
    ]
    names = [str(Namespace.of({"model": model})) for model in (*same, *others)]
    assert names[0] == names[1] and len(set(names)) == 5


@pytest.mark.parametrize("block", [1, 3, 8, 24, 1 << 20])
def test_tensors_are_read_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch):
    """Guards against a copy of a large tensor; the order is that of the elements, whatever their
    layout in memory. An empty tensor has no blocks."""
    monkeypatch.setattr(namespaces, "_BLOCK", block)
    tall = torch.arange(60.0).view(3, 4, 5).transpose(0, 2)
    other = tall.clone()
    other[-1, -1, -1] += 1
    digests = []
    for weight in (tall, tall.contiguous(), other, torch.empty(0, 3)):
        holder = torch.nn.Module()
        holder.weight = torch.nn.Parameter(weight)
        digests.append(fingerprint(holder))
    assert digests[0] == digests[1] and len(set(digests)) == 3


class Quantized(torch.Tensor):
    """A tensor like torchao's: made of two tensors, without the operators of a tensor in memory."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.detach.default:
            raise NotImplementedError(function)
        return cls(args[0].codes, args[0].scales)


def test_weights_quantized_at_load():
    """Guards against a server with ``--torchao-config`` that fails at start."""
    fingerprints = []
    for codes, scale in ((1, 1.0), (1, 1.0), (2, 1.0), (1, 2.0)):
        parts = torch.full((8, 8), codes, dtype=torch.int8), torch.full((8,), scale)
        quantized = torch.nn.Module()
        quantized.weight = torch.nn.Parameter(Quantized(*parts), requires_grad=False)
        fingerprints.append(fingerprint(quantized))
    assert fingerprints[0] == fingerprints[1] and len(set(fingerprints)) == 3


# ---- pages ----


class Pool:
    """The attributes of a host pool that its identity uses."""

    def __init__(self, **changes: object) -> None:
        vars(self).update({"layout": "page_first", "page_size": 16, "layer_num": 4} | changes)
        self.device_pool = SimpleNamespace(dtype=changes.get("dtype", torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("changes", "tp_size"),
    [
        ({"dtype": torch.float8_e5m2}, 4),
        ({"dtype": torch.bfloat16}, 4),
        ({"layout": "page_first_direct"}, 4),
        ({"page_size": 64}, 4),
        ({"layer_num": 5}, 4),
        ({}, 8),
    ],
)
def test_pages_that_are_read_differently_have_different_keys(
    changes: dict[str, object], tp_size: int, monkeypatch: pytest.MonkeyPatch
):
    """Each of these has pages of the same bytes with other content."""
    parts = [SimpleNamespace(label="k", size=64)]
    monkeypatch.setattr(namespaces, "describe", lambda pool: parts)
    plain = Namespace.of(pool_identity(Pool(), 4))
    assert plain == Namespace.of(pool_identity(Pool(), 4))
    assert plain != Namespace.of(pool_identity(Pool(**changes), tp_size))


class Part:
    """A part of a configuration; its text contains its address."""

    def __init__(self, base: float) -> None:
        self.base = base


def config_identity(config: dict[str, Any]) -> Any:
    """Return the identity of the configuration, for a server whose ranks hold no weights."""
    return model_identity(config, ())["config"]


def test_a_configuration_says_the_same_on_every_server():
    """The rotary base changes KV and no weight; the model's folder changes neither. The text of an
    object contains its address, that of a set depends on the process's order: servers of one model
    would never share keys."""
    config = {"rope_theta": 1e6, "_name_or_path": "/a", "text": {"_x": 1, "layers": 2}}
    same = {"rope_theta": 1e6, "_name_or_path": "/b", "text": {"layers": 2}}
    same["transformers_version"] = "5.0"
    assert config_identity(config) == config_identity(same)
    assert config_identity(config) != config_identity(config | {"rope_theta": 1e4})
    parts = [Part(1e4) for _ in range(3)]
    digests = {config_identity({"rope": part, "names": {"a", "b"}}) for part in parts}
    assert len(digests) == 1
    assert config_identity({"rope": Part(1e6), "names": {"b", "a"}}) not in digests
    assert config_identity({"d": torch.float16}) != config_identity({"d": torch.bfloat16})
    with pytest.raises(ValueError, match="buffer_only"):
        config_identity({"hook": lambda: None})
