"""deploy/gateway-api: built by kustomize, checked by schemas and by what weft and gateways need."""

import copy
import shutil
import subprocess
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
FOLDER = ROOT / "deploy" / "gateway-api"
CHECK = ROOT / ".venv-deploy" / "bin" / "kubernetes-validate"

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
SCHEMAS = {
    "HTTPRoute": resource("gateway.networking.k8s.io/v1", "HTTPRoute", ROUTE_SPEC),
    "Gateway": resource("gateway.networking.k8s.io/v1", "Gateway", GATEWAY_SPEC),
}
"""The fields of kinds that are none of Kubernetes itself, with the limits of their own definitions."""


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    built = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(built.stdout))


def _one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def test_gateway_api_manifests_use_only_known_fields(documents: list[dict[str, Any]], tmp_path: Path) -> None:
    own = [each for each in documents if each["kind"] in SCHEMAS]
    assert {each["kind"] for each in own} == set(SCHEMAS)
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
        ("HTTPRoute", ("spec", "rules"), [{"backendRefs": [{"name": "weft", "kind": "Pool"}]}]),
        ("Gateway", ("spec", "gatewayClass"), "istio"),
    ],
)
def test_unknown_field_or_value_is_detected(
    documents: list[dict[str, Any]], kind: str, place: tuple[str, ...], wrong: object
) -> None:
    changed = inner = copy.deepcopy(_one(documents, kind, "weft"))
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, SCHEMAS[kind])


def test_every_request_is_routed_to_the_gateways_without_a_timeout(documents: list[dict[str, Any]]) -> None:
    route = _one(documents, "HTTPRoute", "weft")["spec"]
    assert route["parentRefs"] == [{"name": _one(documents, "Gateway", "weft")["metadata"]["name"]}]
    (rule,) = route["rules"]
    (backend,) = rule["backendRefs"]
    service = _one(documents, "Service", backend["name"])
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    assert rule["timeouts"]["request"] == "0s"


def test_pods_accept_plain_http_from_the_gateway() -> None:
    assert load_config(ROOT / "deploy" / "kubernetes" / "base" / "weft.yaml").gateway.tls_terminated_elsewhere
