"""Command line of the suite.

python -m benchmark.agentic COMMAND [--help]
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "generate": ("benchmark.agentic.traces.cli:generate", "generate a trace of agentic traffic"),
    "sample": (
        "benchmark.agentic.traces.cli:sample",
        "sample a smaller trace with the same sharing",
    ),
    "describe": ("benchmark.agentic.traces.cli:describe", "describe a trace"),
    "convert": ("benchmark.agentic.traces.convert:convert", "convert other formats to a trace"),
    "run": ("benchmark.agentic.studies.cli:run", "measure a study on a fleet and write its page"),
    "report": ("benchmark.agentic.studies.cli:report", "write the page of a run again"),
    "compare": ("benchmark.agentic.studies.cli:compare", "compare two runs of a study on one page"),
    "route": ("benchmark.agentic.router.cli", "run the router"),
    "capacity": (
        "benchmark.agentic.capacity",
        "requests and transfers that decode capacity allows",
    ),
}


def main() -> int:
    """Exit status of the command; the function takes the arguments after its name."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m benchmark.agentic COMMAND [--help]\n")
        print("\n".join(f"  {command:<{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        return 0 if name in ("-h", "--help") else 2
    module, _, function = COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), function or "main")
    return int(command(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
