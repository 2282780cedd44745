"""A real Prometheus that scrapes servers as the example does."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from benchmark.harness.ports import allocate_ports
from benchmark.harness.process import ServerProcess
from unit.documents import alert_rules, queries

#: Seconds between two scrapes, and between two evaluations of the rules.
INTERVAL_S = 1


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _get(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        """Return the values of a query now, without NaN."""
        result = self._get("query", query=query)["result"]
        return [value for each in result if not math.isnan(value := float(each["value"][1]))]

    def active_alerts(self) -> set[str]:
        """Return the alerts that are pending or firing, after checking that each was evaluated."""
        (group,) = self._get("rules")["groups"]
        rules = {rule["name"]: rule for rule in group["rules"]}
        assert set(rules) == set(alert_rules.rules())
        assert {rule["health"] for rule in rules.values()} == {"ok"}, rules
        return {name for name, rule in rules.items() if rule["state"] != "inactive"}

    def wait_for_scrapes(self, count: int) -> None:
        """Wait until each target was scraped ``count`` more times.

        Raises:
            TimeoutError: it took longer than 60 s.
        """
        begun = time.time()
        query = f"min(count_over_time(up[{{:.0f}}s])) >= {count} and min(up) == 1"
        while not self.values(query.format(max(time.time() - begun, 1))):
            if time.time() - begun > 60:
                raise TimeoutError(f"not {count} scrapes in 60 s")
            time.sleep(INTERVAL_S / 4)


@contextmanager
def scraping(urls: Sequence[str], folder: Path) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes ``urls`` with the example's relabelling and the alerts. Skip
    the test if there is none."""
    program = alert_rules.program("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: package prometheus)")
    folder.mkdir(parents=True)
    targets = [url.removeprefix("http://") for url in urls]
    interval = f"{INTERVAL_S}s"
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(alert_rules.RULES)],
        "scrape_configs": [{**queries.example_scrape(), "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = allocate_ports(1)
    command = (
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    url = f"http://127.0.0.1:{port}"
    ready, log = f"{url}/-/ready", folder / "prometheus.log"
    with ServerProcess("prometheus", command, os.environ, log, ready) as process:
        process.wait_ready(60)
        yield Prometheus(url)
