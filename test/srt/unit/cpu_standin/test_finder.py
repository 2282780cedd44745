"""The import hook of the CPU stand-in: provided modules, edits, other hooks beside it, refusal."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cpu_standin
from cpu_standin import edits
from cpu_standin.finder import (
    EDITS,
    StandinFinder,
    edits_of,
)

TARGET = "cpu_standin_test_target"


@pytest.fixture(autouse=True)
def own_import_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A module to edit and no stand-in on the meta path; restores both afterwards."""
    (tmp_path / f"{TARGET}.py").write_text("history = ['executed']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [f for f in sys.meta_path if not isinstance(f, StandinFinder)]
    monkeypatch.setattr(sys, "meta_path", others)
    for name in list(sys.modules):
        if name.partition(".")[0] in (TARGET, "sgl_kernel", "flashinfer", "vllm"):
            monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in (TARGET, "sgl_kernel", "flashinfer", "vllm"):
            del sys.modules[name]


def note(label: str):
    """Return an edit that appends its label to the module's history."""
    return lambda module: module.history.append(label)


class AnotherFinder:
    """Another import hook of the same kind: queries other finders, and adds its own step."""

    def __init__(self, label: str, ask_everyone: bool = False) -> None:
        self.label, self.ask_everyone, self.busy = label, ask_everyone, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TARGET or self.busy:
            return None
        self.busy = True
        first = 0 if self.ask_everyone else sys.meta_path.index(self) + 1
        found = (f.find_spec(name, path, target) for f in sys.meta_path[first:] if f is not self)
        spec = next((s for s in found if s is not None), None)
        self.busy = False
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            note(self.label)(module)

        spec.loader.exec_module = exec_module
        return spec


@pytest.mark.parametrize("is_imported", [False, True])
def test_edit_runs_after_the_module_body(is_imported: bool) -> None:
    """Guards against an edit that runs before the names it replaces exist, against a stand-in
    without effect if torch was imported before it, and against a hook that changes how modules
    look, or invents modules."""
    before = importlib.import_module(TARGET) if is_imported else None
    edits = {TARGET: note("ours"), "absent_module": note("x")}
    sys.meta_path.insert(0, StandinFinder(edits))
    module = importlib.import_module(TARGET)
    assert module.history == ["executed", "ours"] and before in (None, module)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_module")


@pytest.mark.parametrize("ask_everyone", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_two_hooks_on_one_module(ours_first: bool, ask_everyone: bool) -> None:
    """Guards against two hooks that hide each other's edit, or query each other for ever: in either
    order, and also beside a hook that queries all finders and not only those behind it."""
    ours, other = StandinFinder({TARGET: note("ours")}), AnotherFinder("other", ask_everyone)
    sys.meta_path[:0] = [ours, other] if ours_first else [other, ours]
    module = importlib.import_module(TARGET)
    assert module.history[0] == "executed"
    assert sorted(module.history[1:]) == ["other", "ours"]


def test_kernels_are_names() -> None:
    """Guards against a kernel that is silently absent, or does nothing, when called; and against a
    vllm that looks complete, because SGLang probes for its other modules."""
    sys.meta_path.insert(0, StandinFinder({}))
    from sgl_kernel.quantization.gguf import dequantize
    from sgl_kernel.scalar_type import scalar_types
    from vllm._custom_ops import rotary_embedding

    assert isinstance(scalar_types.uint4b8, type(dequantize))
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.quantization\.gguf\.dequantize"):
        dequantize(1, scale=2)
    with pytest.raises(NotImplementedError):
        rotary_embedding()
    assert not hasattr(sys.modules["sgl_kernel"], "__version__")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm.logger")


@pytest.mark.parametrize("edit", sorted({each for of in EDITS.values() for each in of}))
def test_each_edit_is_there(edit: str) -> None:
    """Guards against a server that starts until SGLang imports the module of the edit."""
    file, _, function = edit.partition(":")
    module = importlib.import_module(f"{cpu_standin.__name__}.{file}")
    assert callable(getattr(module, function))


def test_install_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against edits that are applied twice when path and program both install."""
    monkeypatch.setattr(StandinFinder, "__init__", lambda self: None)
    cpu_standin.install(probe=lambda: None)
    cpu_standin.install(probe=lambda: None)
    assert sum(isinstance(f, StandinFinder) for f in sys.meta_path) == 1


def test_install_refuses_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against names that shadow the real kernels on a GPU machine, and against a probe that
    checks no device node."""
    before, node = list(sys.meta_path), tmp_path / "nvidiactl"
    monkeypatch.setattr(cpu_standin, "DEVICE_NODES", (str(tmp_path / "no"), str(node)))
    assert cpu_standin.gpu_device_node() is None
    node.touch()
    with pytest.raises(cpu_standin.StandinRefused) as refused:
        cpu_standin.install()
    assert sys.meta_path == before
    assert str(node) in str(refused.value) and "\n" not in str(refused.value)


def fake_torch(has_cuda: bool) -> SimpleNamespace:
    """Return the part of torch that the edits use."""

    def synchronize(device: object = None) -> None:
        raise RuntimeError("no driver")

    cuda_part = SimpleNamespace(is_available=lambda: has_cuda, synchronize=synchronize)
    cpu_part = SimpleNamespace(Event=object)
    return SimpleNamespace(cuda=cuda_part, cpu=cpu_part, Tensor=type("Tensor", (), {}))


def test_edits_of_torch() -> None:
    """Guards against the error that ends a decode server when it retracts a request, against a
    request that waits for a C++ compiler, in both forms of the decorator, against an event that
    only a GPU records, and against a device that torch reaches without any of the known nodes."""
    torch = fake_torch(has_cuda=False)
    edits.torch_without_cuda(torch)
    torch.cuda.synchronize()
    torch.cuda.synchronize("cpu")
    torch.Tensor().record_stream("a stream")
    assert torch.cuda.Event is torch.cpu.Event

    def function() -> None: ...

    assert torch.compile(function, dynamic=True) is function
    assert torch.compile(fullgraph=True)(function) is function
    with pytest.raises(cpu_standin.StandinRefused, match="torch sees a CUDA device"):
        edits.torch_without_cuda(fake_torch(has_cuda=True))


@pytest.mark.parametrize(
    ("dp_size", "attention_only", "method"),
    [(1, False, "fork"), (2, True, "fork"), (2, False, "spawn")],
)
def test_processes_are_forked(dp_size: int, attention_only: bool, method: str) -> None:
    """Guards against servers that import everything in each process, and against schedulers that
    are forked while other threads run."""
    chosen: list[str] = []

    def prepare(server_args: object) -> None:
        engine.mp.set_start_method("spawn", force=True)

    methods = SimpleNamespace(set_start_method=lambda name, force: chosen.append(name))
    engine = SimpleNamespace(mp=methods, _set_envs_and_config=prepare)
    edits.fork_processes(engine)
    engine._set_envs_and_config(
        SimpleNamespace(dp_size=dp_size, enable_dp_attention=attention_only)
    )
    assert chosen[0] == "spawn" and chosen[-1] == method


def test_a_release_that_has_cpu_forms_keeps_them() -> None:
    """Guards against edits that raise on SGLang 0.5.23, or replace its own forms by those for
    0.5.10."""
    assert edits_of("0.5.10.post1") == EDITS
    edited = edits_of("0.5.23")
    assert {name.removeprefix("sglang.srt.") for name in EDITS.keys() - edited.keys()} == {
        *("constrained.llguidance_backend", "constrained.xgrammar_backend"),
        *("layers.attention.fla.fused_norm_gate", "layers.attention.linear.gdn_backend"),
        "layers.attention.nsa.nsa_indexer",
        *("mem_cache.allocator", "mem_cache.memory_pool", "mem_cache.memory_pool_host"),
        *("model_executor.model_runner", "server_args", "speculative.eagle_info_v2"),
        *("speculative.eagle_utils", "speculative.spec_utils"),
    }
    assert {"torch", "nixl._api", "nixl_cu12._api", "nixl_cu13._api"} < set(edited)
