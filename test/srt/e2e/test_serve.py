"""``make serve`` as a newcomer tries it: a chat, a schema, a tool call, a server that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import cpu_standin
from benchmark.harness.models import REPOSITORY
from benchmark.harness.ports import allocate_ports

START_S = 180
"""Limit of the start of all servers, and of one that is started again."""


class Serve:
    """The command, with what it has printed."""

    def __init__(self, folder: Path) -> None:
        (port,) = allocate_ports(1)
        self.out, self.printed = folder, folder / "printed"
        command = [sys.executable, "-m", "benchmark", "demo", "--serve", "--port", str(port)]
        with self.printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [*command, "--out", str(folder)],
                cwd=REPOSITORY,
                env=cpu_standin.environment(os.environ),
                stdout=printed,
                stderr=subprocess.STDOUT,
                # A shell starts the tests with the signal ignored, if it starts them behind itself.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def text(self) -> str:
        return self.printed.read_text()

    def wait(self, text: str) -> None:
        """Wait until ``text`` was printed."""
        deadline = time.monotonic() + START_S
        while text not in self.text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.2)

    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Return URL and body of each printed command."""
        commands = re.findall(r"^curl (\S+) -H .* -d '(.*)'$", self.text(), re.MULTILINE)
        return [(url, json.loads(body)) for url, body in commands]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    running = Serve(tmp_path_factory.mktemp("serve"))
    try:
        running.wait("Ctrl-C stops it")
        yield running
    finally:
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0, "Ctrl-C is no error"


def choice(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a chat request."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (first,) = json.load(answer)["choices"]
    return dict(first)


def test_a_schema_and_a_tool_call_end(serve: Serve) -> None:
    """Guards against printed examples that the small model does not end: JSON that no program can
    read is a newcomer's first impression."""
    chat, schema, tool = (choice(*request) for request in serve.requests())
    assert "#### 58" in chat["message"]["content"]
    answers = [json.loads(schema["message"]["content"])]
    (call,) = tool["message"]["tool_calls"]
    assert call["function"]["name"] == "record"
    answers.append(json.loads(call["function"]["arguments"]))
    for answer in answers:
        assert answer["item"] in ("pens", "books") and 0 <= answer["left"] <= 99
    assert (schema["finish_reason"], tool["finish_reason"]) == ("stop", "tool_calls")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_half_serves_again(serve: Serve, role: str) -> None:
    """Guards against a pair that ends, or answers no more, because one of its servers was
    killed."""
    (url, body), *_ = serve.requests()
    assert choice(url, body)["finish_reason"] == "stop"
    os.kill(server_of(serve, role), signal.SIGKILL)
    serve.wait(f"{role} serves again")
    assert f"{role}: it ended by signal 9. Starting it again" in serve.text()
    deadline = time.monotonic() + START_S
    while True:  # the router answers 503 until its breaker closes
        try:
            answer = choice(url, body)
            break
        except OSError as error:  # also a connection of the killed server
            assert getattr(error, "code", 503) in (500, 502, 503) and time.monotonic() < deadline
            time.sleep(0.5)
    assert "#### 58" in answer["message"]["content"]


def server_of(serve: Serve, role: str) -> int:
    """Return the process id of the server of a role."""
    (server,) = (
        child.pid
        for child in psutil.Process(serve.process.pid).children()
        if f"--disaggregation-mode {role}" in " ".join(child.cmdline())
    )
    return server
