"""The mesh of deploy/compose with deploy/envoy/edge.yaml in front: its commands and configurations, as processes."""

import json
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import yaml
from compose_processes import COMPOSE, GATEWAYS, ComposeProcesses, compose_file, running_compose
from envoy_process import FOLDER
from mesh_process import WEFT, user_environment

from weft_testing.postgres_server import PYTHON_OF_THE_WHEEL, running_postgres

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

READY_SECONDS = 120.0
FAIL_OVER_SECONDS = 30.0


class Edge:
    """The mesh as a caller sees it."""

    def __init__(self, mesh: ComposeProcesses, url: str, roots: Path) -> None:
        self.mesh = mesh
        self.url = url
        self._roots = roots
        self.key = ""

    def client(self, key: str | None = None) -> httpx2.Client:
        """A client that trusts the edge's certificate, and has a key."""
        trust = ssl.create_default_context(cafile=str(self._roots))
        used = self.key if key is None else key
        headers = {"authorization": f"Bearer {used}"} if used else {}
        return httpx2.Client(headers=headers, verify=trust, timeout=60.0)

    def chat(self, http: httpx2.Client) -> tuple[int, str]:
        """Status and text of a chat."""
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 5}
        answer = http.post(f"{self.url}/v1/chat/completions", json=body)
        return answer.status_code, answer.text

    def until_it_answers(self, seconds: float = FAIL_OVER_SECONDS) -> None:
        """Waits until a chat succeeds."""
        deadline = time.monotonic() + seconds
        with self.client() as http:
            while (last := self.chat(http))[0] != 200:
                assert time.monotonic() < deadline, last
                time.sleep(0.2)


def _make_key(mesh: ComposeProcesses) -> str:
    """A key, by a command in the container of a gateway."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        command = [*WEFT, "keys", "create", "-o", "name", "--home", str(mesh.home("gateway-2"))]
        made = subprocess.run(command, capture_output=True, text=True, env=user_environment(), check=False)
        if made.returncode == 0:
            return made.stdout.strip()
        assert time.monotonic() < deadline, made.stderr
        time.sleep(0.5)


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    if sys.version_info[:2] > PYTHON_OF_THE_WHEEL:
        pytest.skip("there is no wheel pgserver for this Python")
    folder = tmp_path_factory.mktemp("compose")
    with (
        running_postgres() as server,
        server.fresh_database() as name,
        running_compose(folder, server.url(name)) as (mesh, url, roots),
    ):
        edge = Edge(mesh, url, roots)
        edge.key = _make_key(mesh)
        edge.until_it_answers(READY_SECONDS)
        yield edge


def test_edge_rejects_requests_without_a_key_or_with_too_many_headers(edge: Edge) -> None:
    with edge.client("") as http:
        assert (edge.chat(http))[0] == 401
        assert http.get(f"{edge.url}/livez", headers={f"x-{n}": "x" for n in range(200)}).status_code == 431


@pytest.mark.nightly("a matrix of kills")
@pytest.mark.parametrize("name", ["gateway-1", "router-1", "registry-1", "gateway-2", "router-2", "registry-2"])
def test_mesh_survives_the_loss_of_any_one_service(edge: Edge, name: str) -> None:
    edge.mesh.kill(name)
    try:
        edge.until_it_answers()
        with edge.client() as http:
            # It is gone and known to be gone: nothing is lost any more.
            time.sleep(4.0)
            answers = [edge.chat(http) for _ in range(5)]
        assert [status for status, _ in answers] == [200] * 5, answers
    finally:
        edge.mesh.start(name)
    time.sleep(3.0)


def test_compose_file_has_two_locked_down_instances_of_each_service() -> None:
    services = compose_file()["services"]
    for kind in ("registry", "router", "gateway"):
        for name in (f"{kind}-1", f"{kind}-2"):
            service = services[name]
            assert service["command"][:2] == ["serve", kind]
            assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
            assert service["networks"] == ["mesh"]
    assert compose_file()["networks"]["mesh"] == {"internal": True}
    know_it = {name for name, service in services.items() if "PGPASSWORD" in service.get("environment", {})}
    assert know_it == {"registry-1", "registry-2", "router-1", "router-2"}, "no other service reads the database"


def test_services_with_a_read_only_root_have_no_inline_config() -> None:
    """Compose copies such a configuration into the container, which Docker refuses where the root is read-only."""
    file = compose_file()
    in_line = {name for name, config in file["configs"].items() if "content" in config}
    for name, service in file["services"].items():
        if service.get("read_only"):
            assert not in_line & {config["source"] for config in service.get("configs", ())}, name


def test_compose_grace_period_exceeds_the_drain_and_envoy_balances_both_gateways() -> None:
    services = compose_file()["services"]
    weft = yaml.safe_load((COMPOSE / "weft.yaml").read_text())
    minutes = int(re.fullmatch(r"(\d+)m", services["router-1"]["stop_grace_period"])[1])  # type: ignore[index]
    assert weft["drain_seconds"] < minutes * 60
    edge = yaml.safe_load((FOLDER / "edge.yaml").read_text())
    (cluster,) = edge["static_resources"]["clusters"]
    (locality,) = cluster["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    assert addresses == [{"address": name, "port_value": weft["port"]} for name in GATEWAYS]


def test_prometheus_scrapes_every_compose_service() -> None:
    config = yaml.safe_load((COMPOSE / "prometheus.yaml").read_text())
    targets = {target.partition(":")[0] for target in config["scrape_configs"][0]["static_configs"][0]["targets"]}
    services = {
        name for name, each in compose_file()["services"].items() if "serve" in json.dumps(each.get("command", ""))
    }
    assert targets == services
