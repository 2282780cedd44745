"""Every process of a server is patched, regardless of its start method."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

# A sitecustomize for the processes of the test: during the import of a scheduler's module, it
# records the state of the table.
OBSERVER = """
import os, sys
import cpu_standin  # whose own file of this name is hidden by this one
cpu_standin.install()
class Observer:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.managers.scheduler_output_processor_mixin":
            from sglang.srt.patchset import state
            now = state()
            bound = sum(item.status.value == "bound" for g in now.groups for item in g.rows)
            stock = sum(each.status.value == "stock" for each in now.groups)
            with open(os.environ["OBSERVED"], "a") as out:
                out.write(f"{os.getpid()} {os.getppid()} {not now.inert} {bound} {stock}\\n")
        return None
sys.meta_path.insert(0, Observer())
"""
PROGRAM = """
import sys
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], dp_size=2, load_format="dummy",
        skip_tokenizer_init=True, device="cpu", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, disable_piecewise_cuda_graph=True,
        max_total_tokens=2048, mem_fraction_static=0.1, log_level="error",
    )
    out = engine.generate(
        input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2, "temperature": 0}
    )
    print("generated", len(out["output_ids"]))
    engine.shutdown()
"""


def test_engine_in_a_program(model_config, tmp_path):
    """Guards against an unpatched process of ``sglang.Engine`` with two data parallel ranks: the
    program, the controller or a scheduler."""
    (tmp_path / "sitecustomize.py").write_text(OBSERVER)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    observed = tmp_path / "observed"
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", program, model_config()],
        env=os.environ | {"PYTHONPATH": path, "OBSERVED": str(observed)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "generated 2" in result.stdout, result.stdout + result.stderr
    lines = [line.split() for line in observed.read_text().splitlines()]
    parents = {pid: parent for pid, parent, *_ in lines}
    program_pid = next(pid for pid, parent in parents.items() if parent not in parents)
    controller_children = [p for p in parents.values() if parents.get(p) == program_pid]
    assert len(controller_children) == 2, lines  # the two schedulers
    for _, _, active, bound, stock in lines:
        assert (active, stock) == ("True", "0") and int(bound) > 0, lines
