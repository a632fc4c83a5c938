"""weft as a plain HTTP service behind a gateway of Kubernetes: a real Envoy with the route of docs/deploy.md."""

import subprocess
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import yaml
from envoy_process import running_config
from mesh_process import POOL, WEFT, fake_runner, running_mesh, write_config

from weft_testing.free_port import free_port

HOST = "mesh.example"
_FILTERS = "type.googleapis.com/envoy.extensions.filters"


def _envoy(port: int, gateway_port: int) -> str:
    router = {"name": "router", "typed_config": {"@type": f"{_FILTERS}.http.router.v3.Router"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "weft-gateway", "timeout": "0s"}}
    manager: dict[str, Any] = {
        "@type": f"{_FILTERS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "gateway",
        "use_remote_address": True,
        "route_config": {"virtual_hosts": [{"name": "weft", "domains": [HOST], "routes": [route]}]},
        "http_filters": [router],
    }
    listener = {
        "name": "http",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": gateway_port}}}}
    cluster = {
        "name": "weft-gateway",
        "load_assignment": {"cluster_name": "weft-gateway", "endpoints": [{"lb_endpoints": [endpoint]}]},
    }
    return yaml.safe_dump({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder, port = tmp_path_factory.mktemp("gateway"), free_port()
    behind = {"tls_terminated_elsewhere": True, "allowed_hosts": [HOST]}
    config = write_config(folder, fake_runner("a"), gateway=behind)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        envoy = _envoy(port, int(mesh.url.rpartition(":")[2]))
        create = [*WEFT, "keys", "create", "-o", "name", "--home", str(mesh.home)]
        key = subprocess.run(create, capture_output=True, text=True, check=True).stdout.strip()
        headers = {"Host": HOST, "Authorization": f"Bearer {key}"}
        with (
            running_config(folder, envoy, port),
            httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30.0) as client,
        ):
            yield client


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": POOL, "messages": [{"role": "user", "content": "hi"}], **fields}


def test_runner_answers_a_chat_with_a_receipt(http: httpx2.Client) -> None:
    answer = http.post("/v1/chat/completions", json=_body())
    assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
    record = http.get(f"/v1/requests/{answer.headers['x-request-id']}").json()
    assert record["receipt"]["outcome"] == "completed"


def test_stream_is_delivered_to_its_end(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/chat/completions", json=_body(stream=True)) as answer:
        events = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(events) > 2
    assert events[-1] == "data: [DONE]"


def test_unknown_model_returns_the_weft_error(http: httpx2.Client) -> None:
    answer = http.post("/v1/chat/completions", json=_body(model="nobody"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
