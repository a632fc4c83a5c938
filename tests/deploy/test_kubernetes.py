"""The overlays of deploy/kubernetes: built by kustomize, checked by schemas of Kubernetes, and by what weft needs."""

import json
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from weft_app.config.loader import load_config

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl, which has kustomize in it"),
]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CHECK = ROOT / ".venv-deploy" / "bin" / "kubernetes-validate"
OVERLAYS = pytest.mark.parametrize("overlay", ["single", "ha", "gpu-nvidia", "laptops"])
SERVICE_MONITOR = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "spec": {
            "type": "object",
            "required": ["selector", "endpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {"type": "object", "properties": {"matchLabels": {"type": "object"}}},
                "endpoints": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"port": {"type": "string"}, "interval": {"pattern": "^[0-9]+s$"}},
                    },
                },
            },
        },
    },
}
"""The fields of it that are used here: it is no kind of Kubernetes itself."""


def _built(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _documents(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_built(overlay)))


def _faults(text: str, folder: Path) -> str:
    file = folder / "documents.yaml"
    file.write_text(text)
    command = [str(CHECK), "--strict", "--quiet", "--no-warn", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr if ended.returncode else ""


def _workloads(overlay: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for document in _documents(overlay):
        if document["kind"] in ("StatefulSet", "Deployment"):
            yield document, document["spec"]["template"]["spec"]


@OVERLAYS
def test_overlay_uses_only_known_fields(overlay: str, tmp_path: Path) -> None:
    assert _faults(_built(overlay), tmp_path) == ""
    for document in _documents(overlay):
        if document["kind"] == "ServiceMonitor":
            jsonschema.validate(document, SERVICE_MONITOR)


def test_unknown_field_is_detected(tmp_path: Path) -> None:
    assert "readOnlyRoot" in _faults(_built("ha").replace("readOnlyRootFilesystem", "readOnlyRoot"), tmp_path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"apiVersion": "v1", "kind": "ServiceMonitor", "metadata": {}, "spec": {}}, SERVICE_MONITOR)


@OVERLAYS
def test_each_pod_drains_before_it_is_killed(overlay: str) -> None:
    settings = [each["data"]["weft.yaml"] for each in _documents(overlay) if "weft.yaml" in each.get("data", {})]
    drain = max(yaml.safe_load(text)["drain_seconds"] for text in settings)
    for workload, pod in _workloads(overlay):
        before = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["terminationGracePeriodSeconds"] > drain + before, workload["metadata"]["name"]


@OVERLAYS
def test_each_container_is_locked_down_and_has_health_probes(overlay: str) -> None:
    for workload, pod in _workloads(overlay):
        name = workload["metadata"]["name"]
        assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (65532, True), name
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            locked = container["securityContext"]
            assert locked["readOnlyRootFilesystem"] is True, name
            assert locked["capabilities"] == {"drop": ["ALL"]}, name
        service = pod["containers"][0]
        assert service["livenessProbe"]["httpGet"]["path"] == "/livez", name
        assert {"startupProbe", "readinessProbe"} <= set(service), name


@OVERLAYS
def test_each_mounted_volume_exists(overlay: str) -> None:
    for workload, pod in _workloads(overlay):
        there = {volume["name"] for volume in pod["volumes"]}
        there |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= there, workload["metadata"]["name"]


@OVERLAYS
def test_policies_and_budgets_select_existing_pods(overlay: str) -> None:
    pods = [workload["spec"]["template"]["metadata"]["labels"] for workload, _ in _workloads(overlay)]
    found = [
        each for each in _documents(overlay) if each["kind"] in ("NetworkPolicy", "PodDisruptionBudget", "Service")
    ]
    assert {each["kind"] for each in found} == {"NetworkPolicy", "PodDisruptionBudget", "Service"}
    for document in found:
        spec = document["spec"]
        chosen = spec.get("podSelector", spec.get("selector", {}))
        wanted = chosen.get("matchLabels", chosen)
        assert any(wanted.items() <= labels.items() for labels in pods), document["metadata"]["name"]


def test_ha_overlay_has_two_of_each_service_and_lists_both_registries() -> None:
    counts = {workload["metadata"]["name"]: workload["spec"]["replicas"] for workload, _ in _workloads("ha")}
    assert counts == {"weft-registry": 2, "weft-router": 2, "weft-gateway": 2, "weft-runner": 1}
    addresses = yaml.safe_load((FOLDER / "overlays" / "ha" / "weft.yaml").read_text())["addresses"]
    assert [re.match(r"weft-registry-(\d)\.", address)[1] for address in addresses["registry"]] == ["0", "1"]  # type: ignore[index]


def test_laptop_and_publisher_ports_match_the_router_and_exist_only_in_their_overlay() -> None:
    loaded = load_config(FOLDER / "overlays" / "ha" / "weft.yaml")
    listens = {"relay": loaded.relay.listen, "publishers": loaded.publishers.listen}
    found = {(each["kind"], each["metadata"]["name"]): each for each in _documents("laptops")}
    router = found["StatefulSet", "weft-router"]["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: f"0.0.0.0:{port['containerPort']}" for port in router["ports"]}
    service, policy = found["Service", "weft-relay"]["spec"], found["NetworkPolicy", "weft-relay"]["spec"]
    assert {each["targetPort"]: ports[each["targetPort"]] for each in service["ports"]} == listens
    assert {each["port"] for rule in policy["ingress"] for each in rule["ports"]} == set(listens)
    for overlay in ("single", "ha", "gpu-nvidia"):
        policies = [each["spec"] for each in _documents(overlay) if each["kind"] == "NetworkPolicy"]
        opened = {each["port"] for spec in policies for rule in spec.get("ingress", []) for each in rule["ports"]}
        assert not opened & set(listens), overlay


@pytest.mark.parametrize("folder", ["base", "overlays/ha"])
def test_settings_load_as_weft_config(folder: str) -> None:
    loaded = load_config(FOLDER / folder / "weft.yaml")
    assert loaded.gateway.tls_terminated_elsewhere
    assert loaded.drain_seconds == 840.0


def test_gpu_nvidia_runner_has_its_own_config(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "overlays" / "ha" / "weft.yaml", tmp_path / "weft.yaml")
    shutil.copy(FOLDER / "overlays" / "gpu-nvidia" / "runner.yaml", tmp_path / "weft.local.yaml")
    loaded = load_config(tmp_path / "weft.yaml")
    assert [runner.name for runner in loaded.runners or ()] == ["gpu"]


def test_certificates_cover_the_pod_names(tmp_path: Path) -> None:
    command = [str(FOLDER / "secrets.sh"), "postgresql://weft:x@db/weft"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert _faults(text, tmp_path) == ""
    secrets = {each["metadata"]["name"]: each["data"] for each in yaml.safe_load_all(text)}
    used = {
        volume["secret"]["secretName"] for _, pod in _workloads("ha") for volume in pod["volumes"] if "secret" in volume
    }
    assert used <= set(secrets)
    for name in ("registry", "router"):
        certificate, roots = tmp_path / "tls.crt", tmp_path / "ca.crt"
        for file in (certificate, roots):
            file.write_bytes(b64decode(secrets[f"weft-tls-{name}"][file.name]))
        host = f"weft-{name}-1.weft-{name}.weft.svc.cluster.local"
        verify = ["openssl", "verify", "-CAfile", str(roots), "-verify_hostname"]
        assert subprocess.run([*verify, host, str(certificate)], capture_output=True, check=False).returncode == 0
        assert (
            subprocess.run([*verify, "other.example", str(certificate)], capture_output=True, check=False).returncode
            != 0
        )
    assert json.loads(b64decode(secrets["weft-database"]["weft.local.yaml"]))["registry"]
