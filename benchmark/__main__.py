"""``python -m benchmark COMMAND``: the command line of all benchmarks."""

from __future__ import annotations

import importlib
import runpy
import sys

#: Name -> module, or function that takes the arguments; and a description.
COMMANDS = {
    "worth-it": ("worth_it:main", "compute what the package, or PD itself, gives for a workload"),
    "run": ("agentic.studies.cli:run", "measure a study on a fleet and write its page"),
    "report": ("agentic.studies.cli:report", "write the page of a run again"),
    "compare": ("agentic.studies.cli:compare", "compare two runs of a study on one page"),
    "generate": ("traces.cli:generate", "generate a trace of agentic traffic"),
    "convert": ("traces.cli:convert", "make a trace of a request log or of chat histories"),
    "sample": ("traces.cli:sample", "sample a smaller trace with the same sharing"),
    "describe": ("traces.cli:describe", "describe a trace"),
    "route": ("agentic.router.cli:main", "run the router"),
    "demo": ("demo", "show in three short rounds what the flags save"),
    "kv_transfer": ("kv_transfer", "measure what a KV transfer costs"),
    "event_log": ("kv_transfer.event_log", "measure the request stages of real servers"),
    "admission": ("admission", "measure what a step of the decode scheduler costs"),
    "tables": ("tables", "write the tables of the READMEs and of the docs from results"),
}


def main() -> int:
    """Return the exit status of the command. Import only the modules of that command."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m benchmark COMMAND [--help]\n")
        print("\n".join(f"  {command:<{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        return 0 if name in ("-h", "--help") else 2
    module, _, function = COMMANDS[name][0].partition(":")
    if function:
        command = getattr(importlib.import_module(f"benchmark.{module}"), function)
        return int(command(arguments) or 0)
    sys.argv[1:] = arguments
    runpy.run_module(f"benchmark.{module}", run_name="__main__", alter_sys=True)
    return 0  # such a module exits by itself


if __name__ == "__main__":
    sys.exit(main())
