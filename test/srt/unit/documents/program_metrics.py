"""Prints each metric of ours as the code registers it: name, type and labels of its own, as JSON.

A process of its own: a name can be registered once in a process, and other tests do so as well.
"""

from __future__ import annotations

import json

from prometheus_client import REGISTRY

from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.mem_cache.buffer_only import metrics as buffer_only

COMMON = {"model_name": "any"}


def main() -> None:
    for metric in METRICS.values():
        metric.child(COMMON, **dict.fromkeys(metric.labels, "any"))
    buffer_only._prometheus(tuple(COMMON))
    found = {}
    for made in set(REGISTRY._names_to_collectors.values()):
        name = getattr(made, "_name", "")
        if name.startswith("sglang:"):
            total = "_total" if made._type == "counter" else ""
            more = [label for label in made._labelnames if label not in COMMON]
            found[name + total] = [made._type, more]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
