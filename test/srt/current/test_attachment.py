"""How the group ``lead`` comes to a real SGLang 0.5.23: by its plugin loader, and not unasked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from current.decode import Decode
from sglang.srt import runtime_context
from sglang.srt.disaggregation import lead
from sglang.srt.disaggregation.lead import attach
from sglang.srt.patchset import current
from sglang.srt.plugins import load_plugins_by_group

HERE = Path(lead.__path__[0])


@pytest.mark.server()
def test_sglang_finds_the_plugin(decode: Decode) -> None:
    """Guards against an entry point that the loader of this release does not look for."""
    function, _ = load_plugins_by_group(current.PLUGINS)[current.NAME]
    assert function is attach.activate


@pytest.mark.server()
def test_with_nothing_set_no_method_differs(decode: Decode) -> None:
    """Guards against a part that is on because the package is installed. The server is up, and
    SGLang's loader has run."""
    assert attach.attached == []
    wrapped: list[tuple[type, str]] = []

    def note(owner: type, name: str, signature: str) -> Callable[[object], object]:
        wrapped.append((owner, name))
        return lambda ours: ours

    for part in attach.PARTS:
        importlib.import_module(f"{attach.__package__}.{part.name}").install(note)
    for owner, name in wrapped:
        method = getattr(owner, name)
        assert not Path(method.__code__.co_filename).is_relative_to(HERE), f"{owner}.{name}"


@pytest.mark.server()
def test_every_part_fits_this_release() -> None:
    """Guards against a method of SGLang that is not as a part expects it, as ``--check`` says."""
    text, status = current.report(check=True)
    assert status == 0, text


@pytest.mark.server(env={"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"})
def test_another_transfer_backend_is_refused(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rooms that a prefill server over Mooncake does not release: no part has run
    there, and decode would ask for it."""
    assert list(attach.not_tried(decode.scheduler)) == []
    stock = vars(runtime_context.get_disagg())
    other = SimpleNamespace(**stock | {"disaggregation_transfer_backend": "mooncake"})
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: other)
    (reason,) = attach.not_tried(decode.scheduler)
    assert reason == "--disaggregation-transfer-backend other than nixl"
