"""What the file says about TLS, for those who listen and those who connect."""

from pathlib import Path
from typing import Any

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.security import channel_security, server_tls
from weft_app.compose.service_configs import gateway_config
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_config
from weft_testing.certificates import Authority


def config(**tls: Any) -> WeftConfig:
    return parse_config({"tls": tls})


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    ca = Authority()
    written = ca.issue("host").write(tmp_path, ca)
    names = ("certificate_file", "key_file", "ca_file")
    return {name: str(path) for name, path in zip(names, written.paths, strict=True)}


def test_tls_is_off_without_a_certificate_and_callers_present_none() -> None:
    assert server_tls(config(), "registry") is None
    assert not config().gateway.tls.is_set
    assert channel_security(config()).files.paths == ()


def test_roots_make_servers_require_certificates_by_default(files: dict[str, str]) -> None:
    alone = {name: files[name] for name in ("certificate_file", "key_file")}
    asked = {
        "with roots": server_tls(config(**files), "router"),
        "without": server_tls(config(**alone), "router"),
        "told not to": server_tls(config(**files, client_certificates="none"), "router"),
    }
    found = {why: tls is not None and tls.requires_clients for why, tls in asked.items()}
    assert found == {"with roots": True, "without": False, "told not to": False}


def test_each_service_has_its_own_caller_credentials(files: dict[str, str]) -> None:
    told = config(**files, allowed_clients={"runner": ["weft://mesh/router"]}, announced_host="mesh.example")
    runner, registry = server_tls(told, "runner"), server_tls(told, "registry")
    assert runner is not None
    assert registry is not None
    assert (runner.allowed_clients, registry.allowed_clients) == (("weft://mesh/router",), ())
    assert runner.announced_host == "mesh.example"


def test_required_client_certificates_need_roots(files: dict[str, str]) -> None:
    del files["ca_file"]
    with pytest.raises(FieldError, match=r"tls\.ca_file"):
        server_tls(config(**files, client_certificates="required"), "registry")


def test_callers_cannot_be_distinguished_without_certificates(files: dict[str, str]) -> None:
    allowed = {"registry": ["weft://mesh/*"]}
    with pytest.raises(FieldError, match=r"tls\.allowed_clients\.registry"):
        server_tls(config(**files, client_certificates="none", allowed_clients=allowed), "registry")


def test_process_does_not_start_with_invalid_tls_files(files: dict[str, str]) -> None:
    Path(files["key_file"]).write_text("no key")
    with pytest.raises(FieldError, match=r"tls\.certificate_file"):
        channel_security(config(**files))


def test_user_home_is_expanded_and_https_has_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    edge = {"certificate_file": "~/edge.pem", "key_file": "~/edge.key"}
    told = parse_config({"gateway": {"tls": edge, "allowed_hosts": ["Mesh.Example"]}})
    built = gateway_config(told)
    assert built.tls.files.paths == (Path("/home/ann/edge.pem"), Path("/home/ann/edge.key"))
    assert built.tls.files.section == "gateway.tls"
    assert built.allowed_hosts == {"mesh.example"}
