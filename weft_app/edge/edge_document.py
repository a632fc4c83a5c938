"""Configuration of an Envoy in front of gateways: the template edge.yaml with its values."""

import json
from pathlib import Path
from string import Template
from typing import Any

import yaml

from weft.kernel.values.address import is_address
from weft_app.edge.local_replies import local_replies
from weft_app.edge.plan import CertificateFiles, Document, EdgePlan, Endpoint

TEMPLATE = Path(__file__).with_name("edge.yaml")
BURST = 2
"""Burst after a pause, as seconds of the request rate."""
LISTENER = "edge"
CERTIFICATE = "edge"
"""Name of the certificate in its file of secrets."""


def edge_document(plan: EdgePlan) -> Document:
    """Returns the whole configuration."""
    limits = plan.limits
    are_addresses = all(is_address(each.host) for each in plan.gateways)
    values = {
        "listen": _address(plan.listen),
        "gateways": [{"endpoint": {"address": {"socket_address": _address(each)}}} for each in plan.gateways],
        # Names are resolved repeatedly, addresses are not.
        "resolution": "STATIC" if are_addresses else "STRICT_DNS",
        "admin_socket": str(plan.admin_socket),
        "max_connections": limits.max_connections,
        "max_requests": limits.max_requests,
        "max_requests_per_second": limits.max_requests_per_second,
        "burst": BURST * limits.max_requests_per_second,
        "local_replies": local_replies(),
    }
    text = Template(TEMPLATE.read_text("utf-8")).substitute({name: json.dumps(value) for name, value in values.items()})
    document: Document = yaml.safe_load(text)
    (listener,), (cluster,) = document["static_resources"]["listeners"], document["static_resources"]["clusters"]
    (chain,) = listener["filter_chains"]
    if plan.certificate is None:
        del chain["transport_socket"], chain["transport_socket_connect_timeout"]
    else:
        chain["transport_socket"]["typed_config"]["common_tls_context"] |= _certificate(plan.certificate)
    if len(plan.gateways) == 1:
        del cluster["health_checks"]
    if plan.admin_socket is None:
        del document["admin"], document["node"]
    return document


def yaml_text(document: Document, made_by: str) -> str:
    """Returns YAML with the comments that begin the template, and the command that made it."""
    comments = TEMPLATE.read_text("utf-8").partition("\n# Only of an Envoy")[0]
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    return f"# Made by: {made_by}\n{comments}\n{text}"


class _Dumper(yaml.SafeDumper):
    """Writes YAML without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Returns True."""
        del data
        return True


def _address(endpoint: Endpoint) -> Document:
    return {"address": endpoint.host, "port_value": endpoint.port}


def _certificate(certificate: CertificateFiles | Path) -> Document:
    if isinstance(certificate, CertificateFiles):
        files = {
            "certificate_chain": {"filename": certificate.certificate},
            "private_key": {"filename": certificate.key},
        }
        return {"tls_certificates": [files]}
    # Envoy reloads the file when another is moved into its place.
    source = {"resource_api_version": "V3", "path_config_source": {"path": str(certificate)}}
    return {"tls_certificate_sds_secret_configs": [{"name": CERTIFICATE, "sds_config": source}]}
