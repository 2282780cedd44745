"""The import hook of the CPU stand-in: provided modules, edits, other hooks beside it, refusal."""

import importlib
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sglang.srt.hardware_backend import cpu_standin
from sglang.srt.hardware_backend.cpu_standin import cuda, eager, start_method
from sglang.srt.hardware_backend.cpu_standin.finder import (
    ADDED_ON_0_5_23,
    EDIT_FILES,
    StandinFinder,
    default_edits,
)
from sglang.srt.patchset.environment import START_METHOD

TARGET = "cpu_standin_test_target"


@pytest.fixture(autouse=True)
def own_import_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A module to edit, no stand-in on the meta path, and everything put back afterwards."""
    (tmp_path / f"{TARGET}.py").write_text("history = ['executed']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [f for f in sys.meta_path if not getattr(f, "is_cpu_standin", False)]
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
    """An edit that writes its name into the module."""
    return lambda module: module.history.append(label)


class AnotherFinder:
    """Another hook of the same kind: asks other finders, and adds its own step."""

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


def test_edit_runs_after_the_module_body() -> None:
    """Guards against an edit that runs before the names it replaces exist."""
    sys.meta_path.insert(0, StandinFinder({TARGET: note("ours")}))
    assert importlib.import_module(TARGET).history == ["executed", "ours"]


def test_edit_of_a_module_that_is_already_imported() -> None:
    """Guards against a stand-in without effect where torch was imported before it."""
    module = importlib.import_module(TARGET)
    StandinFinder({TARGET: note("ours")})
    assert module.history == ["executed", "ours"]


@pytest.mark.parametrize("ask_everyone", [False, True])
@pytest.mark.parametrize("ours_first", [False, True])
def test_two_hooks_on_one_module(ours_first: bool, ask_everyone: bool) -> None:
    """Guards against two hooks that hide each other's edit, or ask each other for ever: in either
    order, and also beside a hook that asks all finders and not only those behind it."""
    ours, other = StandinFinder({TARGET: note("ours")}), AnotherFinder("other", ask_everyone)
    sys.meta_path[:0] = [ours, other] if ours_first else [other, ours]
    module = importlib.import_module(TARGET)
    assert module.history[0] == "executed"
    assert sorted(module.history[1:]) == ["other", "ours"]


def test_edited_module_keeps_its_loader_and_unknown_modules_their_error() -> None:
    """Guards against a hook that changes how modules look, or invents modules."""
    sys.meta_path.insert(0, StandinFinder({TARGET: note("ours"), "absent_module": note("x")}))
    module = importlib.import_module(TARGET)
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_module")


def test_kernels_are_names() -> None:
    """Guards against a kernel that is silently absent, or does nothing, when it is called."""
    sys.meta_path.insert(0, StandinFinder({}))
    from sgl_kernel.quantization.gguf import dequantize
    from sgl_kernel.scalar_type import scalar_types

    assert isinstance(scalar_types.uint4b8, type(dequantize))
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.quantization\.gguf\.dequantize"):
        dequantize(1, scale=2)
    assert not hasattr(sys.modules["sgl_kernel"], "__version__")


def test_vllm_is_one_name_only() -> None:
    """Guards against a vllm that looks complete: SGLang probes for its other modules."""
    sys.meta_path.insert(0, StandinFinder({}))
    from vllm._custom_ops import rotary_embedding

    with pytest.raises(NotImplementedError):
        rotary_embedding()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vllm.logger")


def test_install_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against edits that are applied twice when hook and program both install."""
    monkeypatch.setattr(StandinFinder, "__init__", lambda self: None)
    cpu_standin.install(probe=lambda: None)
    cpu_standin.install(probe=lambda: None)
    assert sum(getattr(f, "is_cpu_standin", False) for f in sys.meta_path) == 1


def test_install_refuses_a_gpu() -> None:
    """Guards against names that shadow the real kernels on a GPU machine."""
    before = list(sys.meta_path)
    with pytest.raises(cpu_standin.StandinRefused) as refused:
        cpu_standin.install(probe=lambda: "/dev/nvidiactl")
    assert sys.meta_path == before
    assert "/dev/nvidiactl" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_device_nodes_are_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a probe that looks at nothing."""
    node = tmp_path / "nvidiactl"
    monkeypatch.setattr(cpu_standin, "DEVICE_NODES", (str(tmp_path / "no"), str(node)))
    assert cpu_standin.gpu_device_node() is None
    node.touch()
    assert cpu_standin.gpu_device_node() == str(node)


def fake_torch(has_cuda: bool) -> SimpleNamespace:
    """The part of torch that the edits look at."""

    def synchronize(device: object = None) -> None:
        raise RuntimeError("no driver")

    cuda_part = SimpleNamespace(is_available=lambda: has_cuda, synchronize=synchronize)
    return SimpleNamespace(cuda=cuda_part, Tensor=type("Tensor", (), {}))


def test_torch_with_a_device_is_refused() -> None:
    """Guards against a device that torch reaches without any of the known device nodes."""
    with pytest.raises(cpu_standin.StandinRefused, match="torch sees a CUDA device"):
        cuda.edit(fake_torch(has_cuda=True))


def test_synchronize_waits_for_nothing() -> None:
    """Guards against the error that ends a decode server when it retracts a request."""
    torch = fake_torch(has_cuda=False)
    cuda.edit(torch)
    torch.cuda.synchronize()
    torch.cuda.synchronize("cpu")
    torch.Tensor().record_stream("a stream")


def test_compile_returns_the_function() -> None:
    """Guards against a request that waits for a C++ compiler, in both forms of the decorator."""
    torch = fake_torch(has_cuda=False)
    eager.edit(torch)

    def function() -> None: ...

    assert torch.compile(function, dynamic=True) is function
    assert torch.compile(fullgraph=True)(function) is function


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_start_method(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Guards against forked servers that nobody asked for, and against a fork that does not
    take effect when SGLang sets its own start method."""
    chosen: list[str] = []
    multiprocessing = SimpleNamespace(
        set_start_method=lambda name, force: chosen.append(name), Pipe="the real one"
    )
    engine = SimpleNamespace(mp=multiprocessing)
    monkeypatch.setenv(START_METHOD.name, method)
    start_method.edit(engine)
    engine.mp.set_start_method("spawn", force=True)
    assert chosen == [method]
    assert engine.mp.Pipe == "the real one"


def test_unknown_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a misspelled setting that is silently ignored."""
    monkeypatch.setenv(START_METHOD.name, "forkserver")
    with pytest.raises(ImportError, match=START_METHOD.name):
        start_method.edit(SimpleNamespace(mp=None))


def test_a_release_that_has_cpu_forms_keeps_them() -> None:
    """Guards against edits that raise on SGLang 0.5.23, or put 0.5.10's forms in place of its own:
    there only the start of processes and speculation are edited below ``sglang``."""
    assert set(default_edits("0.5.10.post1")) == set(EDIT_FILES)
    edited = default_edits("0.5.23")
    assert {name for name in edited if name.startswith("sglang.")} == {
        *("sglang.srt.entrypoints.engine", "sglang.srt.speculative.draft_utils"),
        *ADDED_ON_0_5_23,
    }
    assert set(ADDED_ON_0_5_23.values()) == {("speculative",), ("draft_attention",)}
    assert {"torch", "nixl._api", "nixl_cu12._api", "nixl_cu13._api"} < set(edited)
