"""``--disable-hybrid-swa-memory`` on only one server of a pair, for a model with windows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.fleet import Pair
from e2e.support import DOZE, ask_both, pair_config, prompt_maker
from e2e.test_families import SERVER_ARGS
from models import families

FLAG = "--disable-hybrid-swa-memory"
AT_ONCE_S = 5.0


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.build(tmp_path_factory.mktemp("gpt_oss") / "gpt_oss", "gpt_oss")


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("on", ["decode", "prefill"])
def test_the_flag_on_one_server(gpt_oss: Path, logs: Path, backend: Any, on: str) -> None:
    """Guards against requests that fail with a message about page numbers, or wait for minutes on
    both servers. With the flag on prefill alone, decode runs without the radix cache; over NIXL it
    cannot be notified, and waits. In every run ``component/transfer/test_announcements.py``."""
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    args = {
        f"{role}_args": (*DOZE, *SERVER_ARGS["gpt_oss"], *((FLAG,) if role == on else ()))
        for role in ("prefill", "decode")
    }
    waits = (backend, on) == ("nixl", "prefill")
    config = pair_config(
        gpt_oss,
        logs,
        page_size=16,
        backend=backend,
        radix=on == "decode",
        skip_warmup=True,
        env={"MC_FORCE_TCP": "1"} if backend == "mooncake" else {},
        decode_env={"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "8"},
        **args,
    )
    params = {"temperature": 0, "max_new_tokens": 4}
    with Pair(config, logs) as pair:
        for number in range(2):
            began = time.monotonic()
            ids = prompt_maker(gpt_oss, seed=number)(40)
            there, here = ask_both(pair, ids, params)
            took = time.monotonic() - began
            assert (took < AT_ONCE_S) != waits, took
            assert there.status_code == 500 and here.status_code == 500
            assert f"{FLAG} to both" in there.text
            if on == "decode":
                assert f"{FLAG} to both" in here.text
                assert f":{pair.layout[0].bootstrap_port} reported" in here.text
        pair.check()  # not ``settle``: the log has a traceback for gpt-oss's missing vocabulary
