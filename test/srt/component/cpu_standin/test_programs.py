"""Stock SGLang parts on the CPU stand-in, each in its own interpreter.

The stand-in is installed at interpreter start, as in a server. A program is judged by its last
line, because NIXL may crash an interpreter while it exits.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_standin

pytestmark = pytest.mark.skipif(
    cpu_standin.gpu_device_node() is not None, reason="refused beside a GPU"
)


def run(
    *arguments: str, path: str = cpu_standin.FOLDER, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with ``path`` on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def check(program: str, **options: str) -> None:
    """Run one of the programs beside this file."""
    done = run(str(Path(__file__).with_name(program)), **options)
    assert done.stdout.rstrip().endswith("CHECKED"), done.stdout + done.stderr


def test_paged_allocator_and_retraction_copies() -> None:
    """Guards against a scheduler that cannot be imported without a driver, a real paged allocator
    that mixes up slots, and the retraction copy that calls CUDA."""
    check("program_allocator.py")


def test_speculative_forms_are_those_of_the_kernels() -> None:
    """Guards against a chain of drafts with other slots or another length than on a GPU: every form
    must do the same as SGLang's Triton kernel, in Triton's interpreter."""
    check("program_speculative.py", TRITON_INTERPRET="1")


def test_hicache_host_pools() -> None:
    """Guards against pinning, and against KV that differs after a round trip through the host,
    in both layouts of the direct I/O backend, with and without MLA."""
    check("program_host_pool.py")


def test_structured_output() -> None:
    """Guards against a server that a request with a JSON schema ends, and against requests without
    one that are restricted to its tokens."""
    root = str(Path(__file__).parents[4])
    check("program_grammar.py", path=os.pathsep.join((cpu_standin.FOLDER, root)))


def test_nixl_moves_cpu_tensors() -> None:
    """Guards against a transfer engine that searches a GPU for memory declared as VRAM."""
    check("program_nixl.py", UCX_TLS="tcp,self")


def test_without_the_patch_set() -> None:
    """Guards against a stand-in that needs the patch set: stock servers are the baseline."""
    done = run(
        "-c",
        "import sglang.srt.mem_cache.allocator as a; print(type(a.alloc_extend_kernel).__name__)",
        SGLANG_PATCHSET="0",
    )
    assert done.stdout.strip() == "Launch", done.stderr


def test_off_by_default() -> None:
    """Guards against a stand-in that is on without being enabled."""
    done = run(
        "-c",
        "import sys, torch; print('cpu_standin' in sys.modules)",
        path="",
    )
    assert done.stdout.strip() == "False", done.stderr
