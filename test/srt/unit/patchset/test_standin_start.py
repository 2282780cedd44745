"""How the hook starts the CPU stand-in: early, once, and whatever the patch set does."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

STANDIN = "sglang/srt/hardware_backend/cpu_standin"


@pytest.fixture
def with_standin(fake_sglang):
    """A stand-in that only tells when it was started."""
    fake_sglang.write(
        f"{STANDIN}/__init__.py",
        """
        import sys
        def install():
            from .part import NAME
            print("started", NAME, "sglang" in sys.modules, "torch" in sys.modules)
        """,
    )
    fake_sglang.write(f"{STANDIN}/part.py", "NAME = 'here'\n")
    fake_sglang.write("torch.py", "")
    return fake_sglang


@pytest.mark.parametrize("patchset", ["0", "1"])
@pytest.mark.parametrize("first", ["sglang", "torch", "sglang.srt.consumer"])
def test_starts_before_torch_and_sglang(with_standin, first, patchset):
    """It has to be there before a kernel library is looked for, for stock SGLang as well."""
    code = f"import {first}, sglang.srt.consumer, torch; print(sglang.srt.consumer.Engine().run())"
    result = with_standin.run(code, SGLANG_CPU_STANDIN="1", SGLANG_PATCHSET=patchset)
    run = ["stock"] if patchset == "0" else ["stock", "loud"]
    assert result.stdout == f"started here False False\n{run}\n"
    assert result.stderr == ""


def test_is_importable_under_its_own_name(with_standin):
    """The package that the hook loaded from its file is the one that others import later."""
    result = with_standin.run(
        """
        import sglang
        from sglang.srt.hardware_backend import cpu_standin
        from sglang.srt.hardware_backend.cpu_standin import part
        print(cpu_standin.part is part)
        """,
        SGLANG_CPU_STANDIN="1",
    )
    assert result.stdout == "started here False False\nTrue\n"


@pytest.mark.parametrize("text", ["true", "YES", " on ", None, "2"])
def test_spellings(with_standin, text):
    """As for SGLang's own variables: it must never shadow the real kernels by accident, and a
    typing error must not silently mean off."""
    result = with_standin.run(
        "import torch, sglang", **{"SGLANG_CPU_STANDIN": text} if text else {}
    )
    is_on = text not in (None, "2")
    assert result.stdout == ("started here False False\n" if is_on else "")
    said = result.stderr.splitlines()
    assert len(said) == (text == "2")
    assert all("SGLANG_CPU_STANDIN" in line and "'2'" in line for line in said)


def test_a_refusal_costs_one_line(with_standin):
    """With a CUDA device the stand-in refuses by raising; SGLang then runs as it is."""
    with_standin.write(
        f"{STANDIN}/__init__.py", "def install():\n    raise RuntimeError('a device is present')\n"
    )
    result = with_standin.run("import sglang; print('ok')", SGLANG_CPU_STANDIN="1")
    assert result.stdout == "ok\n"
    assert result.stderr == "sglang-disagg-patchset: CPU stand-in not active: a device is present\n"
