"""The examples for Docker and Kubernetes: that they parse, and that their flags exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from unit.documents import pages

EXAMPLES = pages.ROOT / "examples"
KNOWN = {
    "sglang.launch_server": pages.server_flags(),
    "sglang_router.launch_router": pages.router_flags(),
}


def check(command: list[str]) -> str:
    """The module that ``command`` runs, after a look at its flags."""
    assert command[:2] == ["python", "-m"]
    module = command[2]
    assert pages.flags(command[3:]) - KNOWN[module] == set()
    return module


def value(command: list[str], flag: str) -> str:
    """What follows ``flag``, in either way to write it."""
    for at, each in enumerate(command):
        if each == flag:
            return command[at + 1]
        if each.startswith(f"{flag}="):
            return each.partition("=")[2]
    raise AssertionError(f"{flag} is not in {command}")


def check_roles(commands: dict[str, list[str]]) -> None:
    """One prefill server, one decode server with the flag, one router."""
    assert {name: check(command) for name, command in commands.items()} == {
        "prefill": "sglang.launch_server",
        "decode": "sglang.launch_server",
        "router": "sglang_router.launch_router",
    }
    prefill, decode, router = commands["prefill"], commands["decode"], commands["router"]
    for flag in ("--model-path", "--page-size", "--disaggregation-transfer-backend"):
        assert value(prefill, flag) == value(decode, flag)
    assert value(prefill, "--disaggregation-mode") == "prefill"
    assert value(decode, "--disaggregation-mode") == "decode"
    assert "--disaggregation-decode-enable-radix-cache" in decode
    at = router.index("--prefill")
    assert router[at + 2] == value(prefill, "--disaggregation-bootstrap-port")
    assert router[at + 1].rpartition(":")[2] == value(prefill, "--port")
    assert value(router, "--decode").rpartition(":")[2] == value(decode, "--port")


def test_compose() -> None:
    """Guards against a file that Docker refuses, or that starts a server with an unknown flag."""
    services = yaml.safe_load((EXAMPLES / "docker-compose.yaml").read_text())["services"]
    check_roles({name: shlex.split(each["command"]) for name, each in services.items()})


def test_kubernetes() -> None:
    """The same for Kubernetes; selectors, ports and the router's addresses fit as well."""
    content: list[dict[str, Any]] = list(
        yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    )
    services = {
        each["metadata"]["name"]: each["spec"] for each in content if each["kind"] == "Service"
    }
    loads = {
        each["metadata"]["name"]: each["spec"] for each in content if each["kind"] != "Service"
    }
    commands = {}
    for name, spec in loads.items():
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert services[name]["selector"] == spec["selector"]["matchLabels"]
        (container,) = spec["template"]["spec"]["containers"]
        commands[name] = container["command"]
        ports = {port["containerPort"] for port in container["ports"]}
        assert {p.get("targetPort", p["port"]) for p in services[name]["ports"]} <= ports
        assert int(value(container["command"], "--port")) in ports
    check_roles(commands)
    pods = {
        f"{name}-{number}.{spec['serviceName']}"
        for name, spec in loads.items()
        if "serviceName" in spec
        for number in range(spec["replicas"])
    }
    assert set(re.findall(r"http://([\w.-]+):", " ".join(commands["router"]))) == pods


def test_dockerfile() -> None:
    """Guards against an image of another release than the package is for."""
    from sglang.srt.patchset.table import BASE_VERSION

    text = (EXAMPLES / "Dockerfile").read_text()
    assert f"'sglang=={BASE_VERSION}'" in text
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    assert all((pages.ROOT / name).exists() for names in copied for name in names.split())
