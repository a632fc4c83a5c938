"""The overlays of deploy/gateway-api: built by kustomize, checked by schemas and by what weft and gateways need."""

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from weft.kernel.lane_names import PICKER_HEALTH_PORT, PICKER_PORT
from weft_app.cli.serve import app as serve_app
from weft_app.config.loader import load_config

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl, which has kustomize in it"),
]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "gateway-api"
CHECK = ROOT / ".venv-deploy" / "bin" / "kubernetes-validate"
GATEWAYS = ("istio", "agentgateway", "envoy-ai-gateway")
OVERLAYS = pytest.mark.parametrize("overlay", GATEWAYS)

PORT = {"type": "integer", "minimum": 1, "maximum": 65_535}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
GROUP = {"type": "string", "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """An object of exactly these fields."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
    }


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = strict({"name": NAME, "namespace": NAME, "labels": LABELS, "annotations": LABELS}, "name")
    fields = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return strict(fields, *fields)


POOL_SPEC = strict(
    {
        "selector": strict({"matchLabels": {**LABELS, "minProperties": 1, "maxProperties": 64}}, "matchLabels"),
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
            "items": strict({"number": PORT}, "number"),
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": strict(
            {
                "group": GROUP,
                "kind": {"type": "string"},
                "name": NAME,
                "port": strict({"number": PORT}, "number"),
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
            "name",
            "port",
        ),
    },
    "selector",
    "targetPorts",
    "endpointPickerRef",
)
BACKEND = strict(
    {
        "group": GROUP,
        "kind": {"enum": ["Service", "InferencePool"]},
        "name": NAME,
        "port": PORT,
        "weight": {"type": "integer", "minimum": 0, "maximum": 1_000_000},
    },
    "name",
)
MATCH = strict(
    {
        "method": {"enum": ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"]},
        "path": strict(
            {
                "type": {"enum": ["Exact", "PathPrefix", "RegularExpression"]},
                "value": {"type": "string", "pattern": "^/", "maxLength": 1024},
            },
            "type",
            "value",
        ),
    }
)
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
ROUTE_SPEC = strict(
    {
        "parentRefs": {"type": "array", "minItems": 1, "maxItems": 32, "items": strict({"name": NAME}, "name")},
        "hostnames": {"type": "array", "items": NAME},
        "rules": {
            "type": "array",
            "minItems": 1,
            "maxItems": 16,
            "items": strict(
                {
                    "matches": {"type": "array", "maxItems": 64, "items": MATCH},
                    "backendRefs": {"type": "array", "minItems": 1, "maxItems": 16, "items": BACKEND},
                    "timeouts": strict({"request": DURATION, "backendRequest": DURATION}),
                }
            ),
        },
    },
    "parentRefs",
    "rules",
)
LISTENER = strict(
    {
        "name": NAME,
        "port": PORT,
        "protocol": {"enum": ["HTTP", "HTTPS", "TLS", "TCP", "UDP"]},
        "allowedRoutes": strict({"namespaces": strict({"from": {"enum": ["All", "Same", "Selector"]}}, "from")}),
    },
    "name",
    "port",
    "protocol",
)
GATEWAY_SPEC = strict(
    {"gatewayClassName": NAME, "listeners": {"type": "array", "minItems": 1, "maxItems": 64, "items": LISTENER}},
    "gatewayClassName",
    "listeners",
)
RULE_SPEC = strict(
    {
        "host": {"type": "string"},
        "trafficPolicy": strict(
            {
                "tls": strict(
                    {
                        "mode": {"enum": ["DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"]},
                        "insecureSkipVerify": {"type": "boolean"},
                    },
                    "mode",
                )
            }
        ),
    },
    "host",
)
SCHEMAS = {
    "InferencePool": resource("inference.networking.k8s.io/v1", "InferencePool", POOL_SPEC),
    "HTTPRoute": resource("gateway.networking.k8s.io/v1", "HTTPRoute", ROUTE_SPEC),
    "Gateway": resource("gateway.networking.k8s.io/v1", "Gateway", GATEWAY_SPEC),
    "DestinationRule": resource("networking.istio.io/v1", "DestinationRule", RULE_SPEC),
}
"""The fields of kinds that are none of Kubernetes itself, with the limits of their own definitions."""


def _built(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _documents(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_built(overlay)))


def _one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def _container(documents: list[dict[str, Any]], name: str) -> dict[str, Any]:
    container: dict[str, Any] = _one(documents, "StatefulSet", name)["spec"]["template"]["spec"]["containers"][0]
    return container


def _ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@OVERLAYS
def test_an_overlay_is_made_of_known_fields(overlay: str, tmp_path: Path) -> None:
    documents = _documents(overlay)
    own = [each for each in documents if each["kind"] in SCHEMAS]
    assert {each["kind"] for each in own} >= {"InferencePool", "HTTPRoute", "Gateway"}
    for document in own:
        jsonschema.validate(document, SCHEMAS[document["kind"]])
    file = tmp_path / "documents.yaml"
    file.write_text(yaml.safe_dump_all(each for each in documents if each["kind"] not in SCHEMAS))
    command = [str(CHECK), "--strict", "--quiet", "--no-warn", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@pytest.mark.parametrize(
    ("kind", "place", "wrong"),
    [
        ("InferencePool", ("spec", "extensionRef"), {"name": "old"}),
        ("InferencePool", ("spec", "targetPorts"), []),
        ("InferencePool", ("spec", "endpointPickerRef", "failureMode"), "failOpen"),
        ("HTTPRoute", ("spec", "rules"), [{"backendRefs": [{"name": "weft", "kind": "Pool"}]}]),
        ("Gateway", ("spec", "gatewayClass"), "istio"),
        ("DestinationRule", ("spec", "trafficPolicy", "tls", "mode"), "simple"),
    ],
)
def test_an_unknown_field_or_value_is_found(kind: str, place: tuple[str, ...], wrong: object) -> None:
    (found,) = (each for each in _documents("istio") if each["kind"] == kind)
    changed = inner = copy.deepcopy(found)
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMAS[kind])


@OVERLAYS
def test_gateway_route_pool_and_picker_find_each_other(overlay: str) -> None:
    documents = _documents(overlay)
    pool, service = _one(documents, "InferencePool", "weft"), _one(documents, "Service", "weft-picker")
    reference = pool["spec"]["endpointPickerRef"]
    assert reference["name"] == service["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    assert port["port"] == reference["port"]["number"] == PICKER_PORT
    router, runner = _container(documents, "weft-router"), _container(documents, "weft-runner")
    assert _ports(router)[port["targetPort"]] == PICKER_PORT
    assert pool["spec"]["targetPorts"] == [{"number": _ports(runner)["http"]}]
    workloads = {each["metadata"]["name"]: each for each in documents if each["kind"] == "StatefulSet"}
    for selector, name in ((service["spec"]["selector"], "weft-router"), (pool["spec"]["selector"], "weft-runner")):
        chosen = selector.get("matchLabels", selector)
        labels = workloads[name]["spec"]["template"]["metadata"]["labels"]
        assert chosen.items() <= labels.items()
    route = _one(documents, "HTTPRoute", "weft")["spec"]
    assert route["parentRefs"] == [{"name": _one(documents, "Gateway", "weft")["metadata"]["name"]}]
    services = {each["metadata"]["name"] for each in documents if each["kind"] == "Service"}
    named = [backend for rule in route["rules"] for backend in rule["backendRefs"]]
    assert {backend["name"] for backend in named if "kind" not in backend} <= services
    assert {backend["name"] for backend in named if backend.get("kind") == "InferencePool"} == {"weft"}


@OVERLAYS
def test_the_picker_is_started_with_flags_that_it_has(overlay: str) -> None:
    container = _container(_documents(overlay), "weft-router")
    arguments = container["args"]
    assert arguments[:2] == ["serve", "picker"]
    command = get_command(serve_app).commands["picker"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    given = dict(argument.partition("=")[::2] for argument in arguments[2:])
    assert set(given) <= known
    assert (given["--grpc-port"], given["--grpc-health-port"]) == (str(PICKER_PORT), str(PICKER_HEALTH_PORT))
    assert "--secure-serving" in given
    assert _ports(container) == {"grpc": 7071, "metrics": 9464, "ext-proc": PICKER_PORT, "health": PICKER_HEALTH_PORT}


@OVERLAYS
def test_gateways_reach_the_picker_and_the_runners_and_nothing_else(overlay: str) -> None:
    policies = [each for each in _documents(overlay) if each["kind"] == "NetworkPolicy"]
    labelled = {"namespaceSelector": {"matchLabels": {"weft-gateways": "true"}}}
    opened = {
        (policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"], port["port"])
        for policy in policies
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
        if labelled in rule["from"]
    }
    assert opened == {("weft-router", "ext-proc"), ("weft-runner", "http")}


def test_pods_have_no_token_of_kubernetes_and_no_role() -> None:
    documents = _documents("istio")
    assert not [each for each in documents if each["kind"] in ("Role", "ClusterRole", "RoleBinding")]
    for each in documents:
        if each["kind"] in ("StatefulSet", "Deployment"):
            assert each["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_settings_are_those_of_weft() -> None:
    assert load_config(FOLDER / "base" / "weft.yaml").gateway.tls_terminated_elsewhere
