"""Which Host and Origin headers are admitted: web pages that may call, and those that may change resources."""

from dataclasses import replace
from socket import gethostname

import pytest

from gateway.gateway_config import CorsConfig, GatewayConfig
from gateway.http.cors import is_allowed_origin
from gateway.intake.headers import require_local_caller, validate_head
from gateway.request_facts import FACTS_KEY, RequestFacts
from weft.kernel.access.principal import Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PAGE = "https://app.example.org"
LISTED = CorsConfig(allowed_origins=(PAGE, "https://*.example.net", "app://obsidian.md"))
BY_DEFAULT, NONE = GatewayConfig(), GatewayConfig(cors=CorsConfig(allowed_origins=()))
OWN_HOST = "localhost:8080"
APPS = [
    "app://obsidian.md",
    "app://-",
    "app://",
    "tauri://localhost",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "capacitor://localhost",
    "vscode-webview://1ivg3a0q5e9",
    "vscode-file://vscode-app",
]
"""Requests of some ran, and their answers could not be read; those of Obsidian were refused."""


def is_allowed(config: GatewayConfig, origin: str) -> bool:
    return is_allowed_origin(origin.encode(), OWN_HOST.encode(), config)


@pytest.mark.parametrize(
    "origin", [PAGE, "https://a.example.net", "https://a.b.example.net", "app://obsidian.md", f"http://{OWN_HOST}"]
)
def test_listed_page_is_allowed_with_subdomains_of_a_wildcard(origin: str) -> None:
    assert is_allowed(GatewayConfig(cors=LISTED), origin)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://app.example.org",
        "https://app.example.org:8443",
        "https://app.example.org.evil.example",
        "https://evilapp.example.org",
        "https://example.net",
        "https://evil.example/.example.net",
        "https://x.example.net@evil.example",
        "http://localhost:1",
        f"ftp://{OWN_HOST}",
        "tauri://localhost",
    ],
)
def test_page_that_is_not_listed_is_not_allowed(origin: str) -> None:
    assert not is_allowed(GatewayConfig(cors=LISTED), origin)


@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:5173", "https://[::1]:3000", *APPS])
def test_pages_and_apps_of_this_machine_are_allowed_by_default(origin: str) -> None:
    assert is_allowed(BY_DEFAULT, origin)
    assert not is_allowed(NONE, origin)


@pytest.mark.parametrize("origin", ["http://mesh.lan:3000", "https://mesh.lan"])
def test_page_of_an_allowed_host_is_allowed_at_any_port(origin: str) -> None:
    assert is_allowed(replace(NONE, allowed_hosts=frozenset({"mesh.lan"})), origin)
    assert not is_allowed(NONE, origin)


def scope_of(
    *headers: tuple[str, str], principal: Principal | None = None, method: str = "GET", path: str = "/ui/"
) -> dict[str, object]:
    facts = RequestFacts("req-1", 0.0)
    if principal is not None:
        facts.principal = principal
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return {"method": method, "path": path, "headers": raw, "http_version": "1.1", FACTS_KEY: facts}


@pytest.mark.parametrize("host", ["localhost:1", "[::1]:8080", "mesh.lan:443", "LOCALHOST"])
def test_host_is_a_name_of_the_gateway_at_any_port(host: str) -> None:
    validate_head(scope_of(("host", host)), replace(NONE, allowed_hosts=frozenset({"mesh.lan"})))


@pytest.mark.parametrize(
    "host",
    [
        "evil@localhost",
        "localhost/evil",
        "localhost?evil",
        "localhost#evil",
        "localhost:evil",
        "localhost:80:80",
        "mesh.lan",
    ],
)
def test_other_host_is_refused(host: str) -> None:
    with pytest.raises(WeftError) as refused:
        validate_head(scope_of(("host", host)), NONE)
    assert refused.value.reason is Reason.PERMISSION_DENIED


PAGE_FILE = "/ui/0123456789abcdef/vendor/mermaid.js"
FRAME = (("host", OWN_HOST), ("origin", "null"))


def test_frame_without_an_origin_may_load_the_files_of_the_page() -> None:
    """Chromium 150 sends `Origin: null` for the scripts of a sandboxed frame: no diagram was drawn."""
    validate_head(scope_of(*FRAME, path=PAGE_FILE), NONE)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/api/v1/caller"),
        ("GET", "/ui/"),
        ("GET", "/ui/0123456789abcdef"),
        ("GET", "/ui/0123456789abcdef/"),
        ("GET", f"/v1{PAGE_FILE}"),
        ("POST", PAGE_FILE),
        ("HEAD", PAGE_FILE),
        ("OPTIONS", PAGE_FILE),
    ],
)
def test_page_without_an_origin_may_do_nothing_else(method: str, path: str) -> None:
    with pytest.raises(WeftError) as refused:
        validate_head(scope_of(*FRAME, method=method, path=path), NONE)
    assert refused.value.reason is Reason.PERMISSION_DENIED


def test_page_of_another_origin_may_not_load_the_files_of_the_page() -> None:
    with pytest.raises(WeftError):
        validate_head(scope_of(("host", OWN_HOST), ("origin", "https://evil.example"), path=PAGE_FILE), NONE)


@pytest.mark.parametrize(
    "host",
    ["host.docker.internal:8080", "host.containers.internal", "host.lima.internal", "app.localhost", gethostname()],
)
def test_container_and_own_name_reach_the_gateway(host: str) -> None:
    validate_head(scope_of(("host", host)), NONE)


@pytest.mark.parametrize("host", ["internal", "evilinternal", "host.internal.evil.example", "stranger.local"])
def test_name_that_a_stranger_can_have_is_refused(host: str) -> None:
    with pytest.raises(WeftError, match="allowed_hosts"):
        validate_head(scope_of(("host", host)), NONE)


def test_page_under_a_reserved_name_is_still_foreign() -> None:
    with pytest.raises(WeftError, match="allowed_origins"):
        validate_head(scope_of(("host", "app.internal:8080"), ("origin", "http://app.internal:8080")), BY_DEFAULT)


FOREIGN = [
    ("https://evil.example", OWN_HOST),
    ("null", OWN_HOST),
    ("http://localhost:3000", OWN_HOST),
    ("http://localhost", OWN_HOST),
    ("", "mesh.lan"),
    ("http://mesh.lan", "mesh.lan"),
]


@pytest.mark.parametrize(("origin", "host"), FOREIGN)
def test_only_pages_of_the_gateway_itself_may_change_resources_without_a_key(origin: str, host: str) -> None:
    """Also where the page may call, and the host is an allowed one."""
    headers = [("host", host), *([("origin", origin)] if origin else [])]
    with pytest.raises(WeftError) as refused:
        require_local_caller(scope_of(*headers))
    assert refused.value.reason is Reason.PERMISSION_DENIED
    require_local_caller(scope_of(*headers, principal=Principal(name="key:k", tenant="ann", access=frozenset())))
    require_local_caller(scope_of(("host", OWN_HOST), ("origin", f"http://{OWN_HOST}")))
    require_local_caller(scope_of(("host", OWN_HOST)))
