"""Debian's Prometheus scrapes a mesh: every panel and alert finds its series, and each alert fires on its cause."""

import asyncio
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from client_environments import CACHE
from kit.debian_package import unpacked
from kit.promql import selectors
from observed_mesh import OBSERVABILITY, Observed, asked_expressions, live_through, running_observed

from weft_testing.free_port import free_ports

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

SCRAPE_SECONDS = 1
START_SECONDS = 30.0
DEADLINE_SECONDS = 30.0
POLL_SECONDS = 0.2
STOP_SECONDS = 20.0


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of `prometheus` and `promtool`."""
    return unpacked("prometheus", CACHE) / "usr" / "bin"


def test_each_alert_fires_on_its_cause_and_not_on_a_healthy_mesh(programs: Path) -> None:
    _promtool(programs, "check", "rules", "alerts.yaml")
    _promtool(programs, "check", "config", "prometheus.yaml")
    _promtool(programs, "test", "rules", "alerts_test.yaml")


def test_alert_test_can_fail(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text((OBSERVABILITY / "alerts.yaml").read_text("utf-8").replace("> 0.8", "> 0.95"))
    (tmp_path / "alerts_test.yaml").write_text((OBSERVABILITY / "alerts_test.yaml").read_text("utf-8"))
    with pytest.raises(AssertionError, match="WeftQueueNearlyFull"):
        _promtool(programs, "test", "rules", "alerts_test.yaml", folder=tmp_path)


def test_every_selector_matches_a_scraped_series(programs: Path, tmp_path: Path) -> None:
    wanted = {selector.text for expression in asked_expressions() for selector in selectors(expression)}
    with running_observed(tmp_path) as observed, _running_prometheus(programs, tmp_path, observed) as url:
        asyncio.run(live_through(observed))
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := [text for text in sorted(wanted) if not _series(url, text)]) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        assert not left, "no series for: " + "\n".join(left)
        assert not _series(url, "weft_of_yesterday_total"), "the negative control"
        (rules,) = _asked(url, "rules")["data"]["groups"]
        assert {rule["health"] for rule in rules["rules"]} <= {"ok", "unknown"}


@contextmanager
def _running_prometheus(programs: Path, folder: Path, observed: Observed) -> Iterator[str]:
    """A Prometheus with the configuration of the repository, but for the address of the mesh and its pace."""
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text("utf-8"))
    config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"}
    config["rule_files"] = [str(OBSERVABILITY / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [urllib.parse.urlsplit(observed.mesh.url).netloc]
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_ports(1)}"
    words = [str(programs / "prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.out").open("wb") as output:
        process = subprocess.Popen(
            [*words, f"--web.listen-address={urllib.parse.urlsplit(url).netloc}"], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(url):
            assert process.poll() is None, (folder / "prometheus.out").read_text()
            assert time.monotonic() < deadline, "Prometheus is not ready"
            time.sleep(POLL_SECONDS)
        yield url
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=START_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _series(url: str, selector: str) -> list[Any]:
    return list(_asked(url, "series", **{"match[]": selector})["data"])


def _asked(url: str, path: str, **query: str) -> dict[str, Any]:
    with urllib.request.urlopen(
        f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=START_SECONDS
    ) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def _promtool(programs: Path, *words: str, folder: Path = OBSERVABILITY) -> None:
    done = subprocess.run(
        [str(programs / "promtool"), *words], cwd=folder, capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
