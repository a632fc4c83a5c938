"""The configurations of the generator, read by the real Envoy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from kit.envoy import faults

from weft_app.config.config import EdgeSettings
from weft_app.edge.edge_document import edge_document
from weft_app.edge.plan import CertificateFiles, EdgePlan, Endpoint

DEPLOYED = Path(__file__).parents[3] / "deploy" / "envoy"
HERE = Endpoint(host="127.0.0.1", port=8080)
PLAN = EdgePlan(listen=HERE, gateways=(HERE,), limits=EdgeSettings())
OTHER = Endpoint(host="127.0.0.1", port=9002)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    issued = trustme.CA().issue_cert("localhost")
    issued.private_key_pem.write_to_path(folder / "edge.key")
    issued.cert_chain_pems[0].write_to_path(folder / "edge.pem")
    return folder


@pytest.mark.parametrize("name", ["edge", "relay"])
def test_envoy_accepts_the_deployed_config(name: str, certificate: Path, tmp_path: Path) -> None:
    text = (DEPLOYED / f"{name}.yaml").read_text().replace("/etc/envoy/tls", str(certificate))
    assert faults(yaml.safe_load(text), tmp_path) == ""


def _plans(certificate: Path, folder: Path) -> dict[str, EdgePlan]:
    files = CertificateFiles(certificate=str(certificate / "edge.pem"), key=str(certificate / "edge.key"))
    by_name = (Endpoint(host="gateway-1", port=80), Endpoint(host="gateway-2", port=80))
    return {
        "plain": PLAN,
        "certificate": replace(PLAN, certificate=files),
        "names": replace(PLAN, gateways=by_name),
        "several addresses": replace(PLAN, gateways=(HERE, OTHER)),
        "IPv6": replace(PLAN, listen=Endpoint(host="::1", port=8080)),
        "supervised": replace(
            PLAN,
            certificate=folder / "certificate.json",
            admin_socket=folder / "admin.sock",
        ),
    }


@pytest.mark.parametrize("name", ["plain", "certificate", "names", "several addresses", "IPv6", "supervised"])
def test_envoy_accepts_each_plan(name: str, certificate: Path, tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text('{"resources": []}')
    assert faults(edge_document(_plans(certificate, tmp_path)[name]), tmp_path) == ""


def test_unknown_envoy_field_is_detected(tmp_path: Path) -> None:
    document: dict[str, Any] = edge_document(PLAN)
    document["static_resources"]["listeners"][0]["adress"] = {}
    assert "adress" in faults(document, tmp_path)
