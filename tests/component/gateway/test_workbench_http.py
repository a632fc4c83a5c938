"""The workbench over HTTP: who gets the page, with which headers, and what the page learns about its caller."""

import base64
import gzip
import json
import re
from hashlib import sha256

import pytest
from gateway_script import WORKBENCH, FixedFleet, serving
from kit.keys import Keys, bearer

from gateway.gateway_config import GatewayConfig, WorkbenchConfig
from gateway.workbench.page_files import MAX_DEPTH
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.dispatch.fleet import FleetView

BROWSER = {"Accept": "text/html,application/xhtml+xml"}
VERSION = WORKBENCH.version


async def test_root_redirects_a_browser_to_the_page() -> None:
    async with serving() as gateway:
        root = await gateway.request("GET", "/", headers=BROWSER)
        short = await gateway.request("GET", "/ui")
        page = await gateway.request("GET", "/ui/")
    assert (root.status, root.headers["location"]) == (303, "ui/")
    assert (short.status, short.headers["location"]) == (308, "ui/")
    assert page.status == 200
    assert page.headers["content-type"].startswith("text/html")
    assert b'<div id="app">' in page.body


@pytest.mark.parametrize(
    ("path", "folder"),
    [("", "./"), ("models", "./"), ("models/", "../"), ("models/org/name", "../../"), ("models/org%2Fname", "../")],
)
async def test_page_links_its_files_relative_to_its_path(path: str, folder: str) -> None:
    """Behind a proxy that publishes the mesh under a path, the page asked for /ui/... of the proxy, which has none."""
    async with serving() as gateway:
        page = await gateway.request("GET", f"/ui/{path}")
    text = page.body.decode()
    links = re.findall(r'(?:href|src)="([^"]+)"', text)
    found = re.search(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    assert found
    links += json.loads(found[1])["imports"].values()
    assert {link[: link.index(VERSION)] for link in links} == {folder}
    digest = base64.b64encode(sha256(found[1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.headers["content-security-policy"]


async def test_page_with_a_path_that_is_too_deep_is_not_found() -> None:
    async with serving() as gateway:
        deepest = await gateway.request("GET", f"/ui/{'a/' * MAX_DEPTH}")
        deeper = await gateway.request("GET", f"/ui/{'a/' * (MAX_DEPTH + 1)}")
    assert (deepest.status, deeper.status) == (200, 404)
    assert f"at most {MAX_DEPTH} slashes" in deeper.error["message"]


async def test_csp_allows_only_own_files_and_no_framing() -> None:
    async with serving() as gateway:
        page = await gateway.request("GET", "/ui/chat")
    policy = page.headers["content-security-policy"]
    for wanted in ("default-src 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"):
        assert wanted in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"


async def test_frame_of_a_diagram_has_no_origin_and_a_policy_without_network() -> None:
    async with serving() as gateway:
        frame = await gateway.request("GET", f"/ui/{VERSION}/diagram.html")
        page = await gateway.request("GET", "/ui/chat")
    policy = frame.headers["content-security-policy"].split("; ")
    assert {"sandbox allow-scripts", "default-src 'none'", "frame-ancestors 'self'"} <= {*policy}
    assert not [rule for rule in policy if "http" in rule or "*" in rule or rule.startswith("connect-src")]
    assert "frame-src 'self'" in page.headers["content-security-policy"]


async def test_frame_without_an_origin_gets_its_scripts_and_no_data() -> None:
    no_origin = {"Origin": "null"}
    async with serving() as gateway:
        script = await gateway.request("GET", f"/ui/{VERSION}/vendor/mermaid.js", headers=no_origin)
        page = await gateway.request("GET", "/ui/chat", headers=no_origin)
        data = await gateway.request("GET", "/api/v1/caller", headers=no_origin)
    assert script.status == 200
    assert "access-control-allow-origin" not in script.headers
    assert (page.status, data.status) == (403, 403)


async def test_versioned_files_are_cached_immutably_and_the_page_is_revalidated() -> None:
    async with serving() as gateway:
        file = await gateway.request("GET", f"/ui/{VERSION}/app/main.js")
        page = await gateway.request("GET", "/ui/")
        again = await gateway.request("GET", "/ui/", headers={"If-None-Match": page.headers["etag"]})
        other = await gateway.request("GET", "/ui/0123456789abcdef/app/main.js")
    assert "immutable" in file.headers["cache-control"]
    assert file.headers["content-type"].startswith("text/javascript")
    assert (again.status, again.body) == (304, b"")
    assert other.status == 404
    assert "reload" in other.error["message"]


async def test_files_are_compressed_for_browsers_that_accept_it() -> None:
    async with serving() as gateway:
        plain = await gateway.request("GET", f"/ui/{VERSION}/style.css")
        small = await gateway.request("GET", f"/ui/{VERSION}/style.css", headers={"Accept-Encoding": "gzip, br"})
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(small.body) == plain.body
    assert len(small.body) < len(plain.body) / 2


async def test_files_outside_the_page_are_not_served() -> None:
    async with serving() as gateway:
        for path in ("../page_files.py", "%2e%2e/page_files.py", "/etc/passwd.txt"):
            answer = await gateway.request("GET", f"/ui/{VERSION}/{path}")
            assert answer.status == 404, path


async def test_address_of_a_name_with_dots_shows_the_page() -> None:
    """A reload of the page of such a model answered that the page has no such file."""
    async with serving() as gateway:
        for path in ("models/qwen2.5:7b", "models/org/name-1.5.gguf", "settings/tenants/a.b"):
            assert (await gateway.request("GET", f"/ui/{path}")).status == 200, path


async def test_page_is_local_only_without_auth() -> None:
    config = GatewayConfig(port=0, allowed_hosts=frozenset({"box.lan"}))
    async with serving(config=config) as gateway:
        answer = await gateway.request("GET", "/ui/", headers={"Host": "box.lan"})
    assert answer.status == 403
    assert "auth.required" in answer.error["message"]


async def test_page_is_served_to_every_host_without_a_key_if_auth_is_enabled() -> None:
    config = GatewayConfig(port=0, allowed_hosts=frozenset({"box.lan"}))
    async with serving(config=config, keys=Keys()) as gateway:
        answer = await gateway.request("GET", "/ui/", headers={"Host": "box.lan"})
    assert answer.status == 200


async def test_disabled_page_returns_404() -> None:
    async with serving(config=GatewayConfig(port=0, workbench=WorkbenchConfig(enabled=False))) as gateway:
        answer = await gateway.request("GET", "/ui/")
    assert answer.status == 404
    assert "gateway.workbench.enabled" in answer.error["message"]


async def test_caller_endpoint_reports_whether_a_key_is_needed_and_its_scopes() -> None:
    async with serving(keys=Keys(["models/team-*:edit", "inference:create"])) as gateway:
        without = (await gateway.request("GET", "/api/v1/caller")).json
        found = (await gateway.request("GET", "/api/v1/caller", headers=bearer())).json
        wrong = await gateway.request("GET", "/api/v1/caller", headers=bearer(secret="6" * 64))
    assert (without["keysRequired"], without["authenticated"]) == (True, False)
    assert "scopes" not in without
    assert (found["authenticated"], found["tenant"]) == (True, "ann")
    assert found["scopes"] == ["inference:create", "inference:view", "models/team-*:edit", "models/team-*:view"]
    assert wrong.status == 401


async def test_caller_gets_the_url_of_traces() -> None:
    workbench = WorkbenchConfig(trace_url="https://traces.example/{trace_id}")
    async with serving(config=GatewayConfig(port=0, workbench=workbench)) as gateway:
        found = json.loads((await gateway.request("GET", "/api/v1/caller")).body)
    assert found["traceUrl"] == "https://traces.example/{trace_id}"


@pytest.mark.parametrize("tenant", ["ann", "another"])
async def test_caller_is_told_whether_its_prompts_are_captured(tenant: str) -> None:
    declared = Tenant(manifest=TenantManifest(name=tenant, capture=True))
    fleet = FixedFleet(FleetView(revision=1, tenants={tenant: declared}))
    async with serving(keys=Keys(["inference:create"]), fleet=fleet) as gateway:
        found = (await gateway.request("GET", "/api/v1/caller", headers=bearer())).json
    assert found["captured"] is (tenant == "ann")


async def test_local_caller_without_auth_has_full_access() -> None:
    async with serving() as gateway:
        found = (await gateway.request("GET", "/api/v1/caller")).json
    assert (found["keysRequired"], found["authenticated"], found["name"]) == (False, True, "local")
