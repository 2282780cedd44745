"""The examples for Docker and Kubernetes: valid files with existing flags."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from benchmark.harness import servers
from sglang.srt.patchset.table import BASE_VERSION, CURRENT_VERSION
from unit.documents import pages

EXAMPLES = pages.ROOT / "examples"
MASTER = "mooncake_master"
KNOWN = {
    "sglang.launch_server": pages.server_flags(),
    "sglang_router.launch_router": pages.router_flags(),
    MASTER: pages.flags(list(servers.store()[0].command)),
}
COMPOSE = ("docker-compose.yaml", "docker-compose-whole.yaml")
COMPOSE_RDMA = "docker-compose-rdma.yaml"
KUBERNETES = ("kubernetes.yaml", "kubernetes-whole.yaml")
KUBERNETES_RDMA = "kubernetes-rdma.yaml"
"""A patch of the servers in ``KUBERNETES``."""
GROUPS = "kubernetes-lws.yaml"
"""Instead of the first of ``KUBERNETES``: each server is a group of two pods."""
PARTS = pytest.mark.parametrize("parts", [1, 2], ids=["pair", "whole"])
"""Files that are used together: the pair alone, or with the store."""


def check(command: list[str]) -> str:
    """Return the program or module that ``command`` runs, after checking its flags."""
    module = command[0] if command[0] == MASTER else command[2]
    assert module == MASTER or command[:2] == ["python", "-m"]
    assert pages.flags(command[1:]) - KNOWN[module] == set()
    return module


def value(command: list[str], flag: str) -> str:
    """Return the argument of ``flag``, in either spelling."""
    for index, word in enumerate(command):
        if word == flag:
            return command[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    raise AssertionError(f"{flag} is not in {command}")


def check_roles(commands: dict[str, list[str]]) -> None:
    """Check that there is one prefill server, one decode server with the flag, one router and at
    most one store."""
    assert {name: check(command) for name, command in commands.items() if name != "store"} == {
        "prefill": "sglang.launch_server",
        "decode": "sglang.launch_server",
        "router": "sglang_router.launch_router",
    }
    if "store" in commands:
        assert check(commands["store"]) == MASTER
    prefill, decode, router = commands["prefill"], commands["decode"], commands["router"]
    for flag in ("--model-path", "--page-size", "--disaggregation-transfer-backend"):
        assert value(prefill, flag) == value(decode, flag)
    assert value(prefill, "--disaggregation-mode") == "prefill"
    assert value(decode, "--disaggregation-mode") == "decode"
    assert "--disaggregation-decode-enable-radix-cache" in decode
    index = router.index("--prefill")
    assert router[index + 2] == value(prefill, "--disaggregation-bootstrap-port")
    assert router[index + 1].rpartition(":")[2] == value(prefill, "--port")
    assert value(router, "--decode").rpartition(":")[2] == value(decode, "--port")


def check_clients(
    commands: dict[str, list[str]], stock: dict[str, list[str]], env: dict[str, dict[str, Any]]
) -> None:
    """Check that both servers keep their flags without the store, and that prefill only reads from
    the store and decode only writes to it."""
    for role in ("prefill", "decode"):
        assert set(stock[role]) < set(commands[role])
        assert value(commands[role], "--hicache-host-memory-mode") == "buffer_only"
        assert env[role]["MOONCAKE_MASTER"].endswith(":50051")
        assert env[role]["MOONCAKE_TE_META_DATA_SERVER"].endswith(":8080/metadata")
    for flag in ("--hicache-storage-backend", "--hicache-mem-layout"):
        assert value(commands["prefill"], flag) == value(commands["decode"], flag)
    pages_of = {role: int(value(commands[role], "--hicache-buffer-pages")) for role in env}
    assert pages_of["prefill"] == 4 * pages_of["decode"], "decode's stage serves writes only"
    reads, writes = "--enable-hierarchical-cache", "--disaggregation-decode-enable-offload-kvcache"
    assert reads in commands["prefill"] and reads not in commands["decode"]
    assert writes in commands["decode"] and writes not in commands["prefill"]
    assert env["prefill"] == env["decode"]


def documents(*names: str) -> list[dict[str, Any]]:
    """Return the declared objects. A later declaration of an object replaces an earlier one."""
    objects = {}
    for name in names:
        for object_ in yaml.safe_load_all((EXAMPLES / name).read_text()):
            objects[object_["kind"], object_["metadata"]["name"]] = object_
    return list(objects.values())


def pods_by_app(*names: str) -> dict[str, dict[str, Any]]:
    """Return each workload's specification of pods, by the label that selects them."""
    pods = {}
    for object_ in documents(*names):
        if template := pod_template(object_):
            pods[template["metadata"]["labels"]["app"]] = template["spec"]
    return pods


def pod_template(object_: dict[str, Any]) -> dict[str, Any] | None:
    """Return the template of a workload's pods; None of an object without pods."""
    spec: dict[str, Any] = object_["spec"]
    template: dict[str, Any] | None = spec.get("leaderWorkerTemplate", {}).get("workerTemplate")
    return template or spec.get("template")


def selected(selector: dict[str, Any]) -> set[str]:
    """Return the values of the label ``app`` that a selector names."""
    (expression,) = selector.get("matchExpressions") or [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in selector["matchLabels"].items()
    ]
    assert (expression["key"], expression["operator"]) == ("app", "In")
    return set(expression["values"])


def known_to_kubernetes(object_: dict[str, Any]) -> dict[str, Any]:
    """Return the object; of a group of pods, whose kind has no schema, one of its pods."""
    if object_["kind"] != "LeaderWorkerSet":
        return object_
    template = pod_template(object_)
    assert template
    metadata = {"name": object_["metadata"]["name"], **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("name", [*KUBERNETES, GROUPS, "networkpolicy.yaml"])
def test_kubernetes_accepts_the_files(name: str) -> None:
    """Guards against a misspelt or misplaced field, with the schemas of the first and the last
    Kubernetes release that the validator knows."""
    versions = kubernetes_validate.utils.all_versions()
    for object_ in map(known_to_kubernetes, documents(name)):
        for version in (versions[0], versions[-1]):
            kubernetes_validate.validate(object_, version.rpartition(".")[0], strict=True)
    wrong = {**documents(name)[0], "specs": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, versions[-1].rpartition(".")[0], strict=True)


def patched(value: Any, patch: Any) -> Any:
    """Return ``value`` after a strategic merge patch: objects by key, and lists of objects by the
    name of each, as Kubernetes merges containers and their variables."""
    if isinstance(patch, dict):
        merged = {key: patched((value or {}).get(key), patch[key]) for key in patch}
        return {**(value or {}), **merged}
    if isinstance(patch, list) and isinstance(patch[0], dict):
        before, after = ({item["name"]: item for item in items or ()} for items in (value, patch))
        return list(patched(before, after).values())
    return patch


@pytest.mark.parametrize("names", [KUBERNETES[:1], KUBERNETES], ids=["pair", "whole"])
def test_rdma_in_pods(names: tuple[str, ...]) -> None:
    """Guards against a patch that Kubernetes refuses, or that replaces more than it adds: the same
    container with devices and locked memory."""
    patch = yaml.safe_load((EXAMPLES / KUBERNETES_RDMA).read_text())
    versions = kubernetes_validate.utils.all_versions()
    servers = [o for o in documents(*names) if o["metadata"]["name"] in ("prefill", "decode")]
    sets = [object_ for object_ in servers if object_["kind"] == "StatefulSet"]
    assert len(sets) == 2
    for object_ in sets:
        with_rdma = patched(object_, patch)
        for version in (versions[0], versions[-1]):
            kubernetes_validate.validate(with_rdma, version.rpartition(".")[0], strict=True)
        (before,) = object_["spec"]["template"]["spec"]["containers"]
        (after,) = with_rdma["spec"]["template"]["spec"]["containers"]
        assert after.pop("securityContext") == {"capabilities": {"add": ["IPC_LOCK"]}}
        limits = after["resources"].pop("limits")
        (added,) = limits.keys() - before["resources"]["limits"].keys()
        assert added.startswith("rdma/") and "nvidia.com/gpu" in limits
        variables = {variable["name"] for variable in after.pop("env")}
        assert variables == {"UCX_NET_DEVICES", *(v["name"] for v in before.get("env", ()))}
        same = {key: before[key] for key in before if key not in ("env", "resources")}
        assert after == {**same, "resources": {}}


def test_scraped_pods_have_the_port() -> None:
    """Guards against a monitor that selects no pods. No package has a schema of the Prometheus
    operator's kind."""
    (monitor,) = documents("podmonitor.yaml")
    assert (monitor["kind"], monitor["apiVersion"]) == ("PodMonitor", "monitoring.coreos.com/v1")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert selected(monitor["spec"]["selector"]) == {"prefill", "decode"}
    for app, file in itertools.product(("prefill", "decode"), (KUBERNETES[0], GROUPS)):
        (container,) = pods_by_app(file)[app]["containers"]
        assert endpoint["port"] in {port["name"] for port in container["ports"]}
        assert "--enable-metrics" in container["command"]


@pytest.mark.parametrize(
    "names", [KUBERNETES[:1], KUBERNETES, (GROUPS,)], ids=["pair", "whole", "groups"]
)
def test_every_pod_is_behind_a_policy(names: tuple[str, ...]) -> None:
    """Guards against a workload open to all pods, and a policy that keeps its router out."""
    covered = set()
    pods = pods_by_app(*names)
    for policy in documents(*names, "networkpolicy.yaml"):
        if policy["kind"] != "NetworkPolicy" or "Ingress" not in policy["spec"]["policyTypes"]:
            continue
        apps = selected(policy["spec"]["podSelector"])
        assert apps <= set(pods)
        covered |= apps
        ports = {p["port"] for rule in policy["spec"]["ingress"] for p in rule.get("ports", ())}
        for app in apps:
            (container,) = pods[app]["containers"]
            assert ports <= {port["containerPort"] for port in container["ports"]}
    assert covered == set(pods)
    servers = documents("networkpolicy.yaml")[0]["spec"]["ingress"]
    assert [selected(rule["from"][0]["podSelector"]) for rule in servers] == [
        {"prefill", "decode"},
        {"router"},
    ]


def test_probes_name_ports_and_wait_for_a_token() -> None:
    """Guards against a probe that fails every healthy server: /health answers after 1 to 20 s."""
    pods = [*pods_by_app(*KUBERNETES).items(), *pods_by_app(GROUPS).items()]
    for app, pod in pods:
        (container,) = pod["containers"]
        names = {port["name"] for port in container["ports"]}
        probes = {name: container[name] for name in container if name.endswith("Probe")}
        assert {"readinessProbe", "livenessProbe"} <= set(probes)
        for probe in probes.values():
            assert probe["httpGet"]["port"] in names
            assert app in ("router", "store") or probe["timeoutSeconds"] > 20


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        *(("compose-spec", f"examples/{name}") for name in (*COMPOSE, COMPOSE_RDMA)),
        ("github-workflows", ".github/workflows/ci.yml"),
        ("github-workflows", ".github/workflows/nightly.yml"),
    ],
)
def test_schemas(schema: str, file: str, tmp_path: Path) -> None:
    """Guards against a file that Docker or the runner refuses."""
    text = (pages.ROOT / file).read_text()
    assert valid(schema, pages.ROOT / file)
    broken = tmp_path / "broken.yaml"
    broken.write_text(re.sub("^(services|jobs):", r"\1x:", text, flags=re.MULTILINE))
    assert not valid(schema, broken)


def valid(schema: str, file: Path) -> bool:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    done = subprocess.run([*check, str(file)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_workflows_run_existing_commands() -> None:
    """Guards against a command that was renamed."""
    makefile = (pages.ROOT / "Makefile").read_text()
    for name in ("ci", "nightly"):
        text = (pages.ROOT / f".github/workflows/{name}.yml").read_text()
        for job in yaml.safe_load(text)["jobs"].values():
            *_, command = [step["run"] for step in job["steps"] if "run" in step]
            is_target = re.search(f"^{command.removeprefix('make ')}:", makefile, re.MULTILINE)
            assert is_target or os.access(pages.ROOT / command, os.X_OK), command


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.sglang"])
def test_images(name: str) -> None:
    """Guards against an image of another release, a file that is copied and does not exist, and a
    build that does not check what it installed."""
    text = (EXAMPLES / name).read_text()
    lines = text.replace("\\\n", " ").splitlines()
    steps = [shlex.split(line) for line in lines if line and not line.startswith("#")]
    assert {step[0] for step in steps} <= {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN"}
    for step in steps:
        for path in step[1:-1] if step[0] == "COPY" else ():
            # ``make wheel`` leaves the wheel there.
            assert (pages.ROOT / path).exists() or path == "dist/*.whl", path
    options = dict(re.findall(r"--build-arg (\w+)=(\S+)", text))
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    assert set(options) <= set(defaults)
    if name == "Dockerfile.sglang":
        assert "FROM lmsysorg/sglang:v${SGLANG}" in lines
        found = [given["SGLANG"] for given in (defaults, options)]
        for constraints in ("constraints.txt", "constraints-current.txt"):
            text = (pages.ROOT / constraints).read_text()
            assert f"nixl-cu{defaults['CUDA']}=={defaults['NIXL']}\n" in text
    else:
        found = [*re.findall(r"sglang==([\w.]+)", text), CURRENT_VERSION]
    assert found == [BASE_VERSION, CURRENT_VERSION]
    kind, program, *command = steps[-1]
    assert (kind, program.rstrip("3")) == ("RUN", "python")
    run = subprocess.run(
        [sys.executable, *command, "--help"], capture_output=True, text=True, check=True
    )
    assert command[-1] == "--check" and "--check" in run.stdout


def test_compose() -> None:
    """Guards against a file that Docker refuses, or that starts a server with an unknown flag; and
    against servers with a store that differ from those without it in more than its flags."""
    alone, added = (yaml.safe_load((EXAMPLES / name).read_text())["services"] for name in COMPOSE)
    stock = {name: shlex.split(service["command"]) for name, service in alone.items()}
    check_roles(stock)
    commands = stock | {name: shlex.split(service["command"]) for name, service in added.items()}
    check_roles(commands)
    env = {name: service["environment"] for name, service in added.items() if name != "store"}
    check_clients(commands, stock, env)
    for name, service in alone.items():
        probe = service["healthcheck"]
        assert f":{value(stock[name], '--port')}/" in probe["test"][-1]
        assert int(probe["timeout"].removesuffix("s")) > 20, "/health answers after 1 to 20 s"


def test_compose_with_rdma() -> None:
    """Guards against a file that changes servers instead of giving them devices."""
    alone, rdma = (
        yaml.safe_load((EXAMPLES / name).read_text())["services"]
        for name in (COMPOSE[0], COMPOSE_RDMA)
    )
    assert rdma.keys() == alone.keys() - {"router"}
    for name, service in rdma.items():
        assert service.keys() & alone[name].keys() == set(), "Compose would merge or replace it"
        assert service["devices"] == ["/dev/infiniband"] and service["cap_add"] == ["IPC_LOCK"]
        assert service["ulimits"] == {"memlock": -1} and alone[name]["network_mode"] == "host"


def test_kubernetes_servers_with_a_store() -> None:
    """Guards against servers with a store that differ from those without it in more than its flags
    and its address."""
    stock, whole = pods_by_app(KUBERNETES[0]), pods_by_app(*KUBERNETES)
    commands: list[dict[str, list[str]]] = [{}, {}]
    env = {}
    for role in ("prefill", "decode"):
        (before,), (after,) = stock[role].pop("containers"), whole[role].pop("containers")
        commands[0][role], commands[1][role] = before.pop("command"), after.pop("command")
        env[role] = {
            variable["name"]: variable.get("value", variable.get("valueFrom"))
            for variable in after.pop("env")
        }
        assert (stock[role], before) == (whole[role], after)
    check_clients(commands[1], commands[0], env)
    (master,) = whole["store"]["containers"]
    assert {50051, 8080} <= {port["containerPort"] for port in master["ports"]}


@PARTS
def test_kubernetes(parts: int) -> None:
    """Guards the same for Kubernetes, and matching selectors, ports and addresses of the router."""
    services, commands, pods = {}, {}, set()
    declared = documents(*KUBERNETES[:parts])
    for object_ in sorted(declared, key=lambda object_: object_["kind"] != "Service"):
        name, spec = object_["metadata"]["name"], object_["spec"]
        if object_["kind"] == "Service":
            services[name] = spec
        if "template" not in spec:
            continue
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels == services[name]["selector"]
        (container,) = spec["template"]["spec"]["containers"]
        commands[name] = container["command"]
        ports = {port["containerPort"] for port in container["ports"]}
        assert {p.get("targetPort", p["port"]) for p in services[name]["ports"]} <= ports
        assert name == "store" or int(value(container["command"], "--port")) in ports
        if "serviceName" in spec:
            pods |= {f"{name}-{index}.{spec['serviceName']}" for index in range(spec["replicas"])}
    check_roles(commands)
    assert set(re.findall(r"http://([\w.-]+):", " ".join(commands["router"]))) == pods


def test_groups_of_pods() -> None:
    """Guards against groups whose pods do not form one server, and against a router or a service
    that does not reach their first pods, which the controller names NAME-INDEX."""
    commands, leaders = {}, set()
    services = {
        o["metadata"]["name"]: o["spec"] for o in documents(GROUPS) if o["kind"] == "Service"
    }
    for object_ in documents(GROUPS):
        if (template := pod_template(object_)) is None:
            continue
        name, spec = object_["metadata"]["name"], object_["spec"]
        (container,) = template["spec"]["containers"]
        commands[name] = command = container["command"]
        assert services[name]["selector"] == template["metadata"]["labels"]
        ports = {port["containerPort"] for port in container["ports"]}
        assert {p.get("targetPort", p["port"]) for p in services[name]["ports"]} <= ports
        if object_["kind"] == "LeaderWorkerSet":
            leaders |= {f"{name}-{index}.{name}" for index in range(spec["replicas"])}
            gpus = container["resources"]["limits"]["nvidia.com/gpu"]
            size = spec["leaderWorkerTemplate"]["size"]
            assert int(value(command, "--tp-size")) == size * gpus
            assert value(command, "--nnodes") == "$(LWS_GROUP_SIZE)"
            assert value(command, "--node-rank") == "$(LWS_WORKER_INDEX)"
            assert value(command, "--dist-init-addr").startswith("$(LWS_LEADER_ADDRESS):")
    check_roles(commands)
    assert set(re.findall(r"http://([\w.-]+):", " ".join(commands["router"]))) == leaders


def test_dockerfile() -> None:
    """Guards against an image of another release than the package supports."""
    from sglang.srt.patchset.table import BASE_VERSION

    text = (EXAMPLES / "Dockerfile").read_text()
    assert f"'sglang=={BASE_VERSION}'" in text
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    assert all((pages.ROOT / name).exists() for names in copied for name in names.split())
