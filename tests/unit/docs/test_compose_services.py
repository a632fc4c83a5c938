"""The services of deploy/compose/compose.yaml, as far as the file itself says; tests/containers runs it."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[3] / "deploy"


def compose_file() -> dict[str, Any]:
    """The file, its merge keys resolved."""
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text("utf-8"))
    return loaded


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
    weft = yaml.safe_load((DEPLOY / "compose" / "weft.yaml").read_text())
    minutes = int(re.fullmatch(r"(\d+)m", services["router-1"]["stop_grace_period"])[1])  # type: ignore[index]
    assert weft["drain_seconds"] < minutes * 60
    edge = yaml.safe_load((DEPLOY / "envoy" / "edge.yaml").read_text())
    (cluster,) = edge["static_resources"]["clusters"]
    (locality,) = cluster["load_assignment"]["endpoints"]
    addresses = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    assert addresses == [{"address": name, "port_value": weft["port"]} for name in ("gateway-1", "gateway-2")]


def test_prometheus_scrapes_every_compose_service() -> None:
    config = yaml.safe_load((DEPLOY / "compose" / "prometheus.yaml").read_text())
    targets = {target.partition(":")[0] for target in config["scrape_configs"][0]["static_configs"][0]["targets"]}
    services = {
        name for name, each in compose_file()["services"].items() if "serve" in json.dumps(each.get("command", ""))
    }
    assert targets == services
