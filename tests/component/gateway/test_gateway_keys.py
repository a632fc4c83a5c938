"""A gateway that requires keys: admission, access, and the tenant of requests."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from file_script import MemoryFiles
from gateway_script import RunningGateway, serving
from kit.keys import KEY, PEPPER, SECRET, Keys, bearer, ring_of, verifier

from gateway.gateway_config import GatewayConfig
from weft.kernel.access.principal import DEFAULT_SCOPES, key_digest, key_text
from weft.kernel.requests.request_values import Priority

GOOD = key_text(KEY, SECRET)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def ask(gateway: RunningGateway, headers: dict[str, str], path: str = "/v1/chat/completions") -> tuple[int, str]:
    answer = await gateway.request("POST", path, CHAT, headers)
    return answer.status, answer.json.get("error", {}).get("code", "")


async def test_valid_key_is_accepted_in_every_client_header_and_identifies_the_caller() -> None:
    for headers in (bearer(), {"authorization": f"bearer {GOOD}"}, {"X-API-Key": GOOD}):
        async with serving(keys=Keys()) as gateway:
            assert await ask(gateway, headers) == (200, "")
            (context,) = gateway.dispatcher.contexts
            assert (context.tenant, context.caller) == ("ann", "key:abcdefghijk1")


@pytest.mark.parametrize(("name", "before"), [("Authorization", "Bearer "), ("x-api-key", "")])
async def test_duplicate_key_headers_are_rejected_unless_auth_is_disabled(name: str, before: str) -> None:
    async with serving(keys=Keys()) as guarded, serving() as open_to_all:
        for order in ((GOOD, "wrong"), ("wrong", GOOD), (GOOD, GOOD)):
            shown = "".join(f"{name}: {before}{key}\r\n" for key in order)
            raw = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{shown}Connection: close\r\n\r\n".encode()
            error = (await guarded.exchange(raw)).of(400)["error"]
            assert (error["code"], name.lower() in error["message"]) == ("malformed_request", True)
            assert (await open_to_all.exchange(raw)).status == 200


OTHER = key_text("otherotherot", SECRET)


async def test_keys_of_two_tenants_in_one_request_are_rejected() -> None:
    both = ring_of(verifier(), verifier("otherotherot", tenant="bob"))
    async with serving(keys=Keys(both)) as gateway:
        for headers, query in (
            ({"Authorization": f"Bearer {GOOD}", "X-API-Key": OTHER}, ""),
            ({"Authorization": f"Bearer {OTHER}", "X-API-Key": GOOD}, ""),
            ({"Authorization": f"Bearer {GOOD}", "X-API-Key": key_text("unknownunkno", SECRET)}, ""),
            ({"Authorization": f"Bearer {GOOD}"}, f"?api_key={OTHER}"),
            ({"X-API-Key": GOOD}, f"?a=b&key={OTHER}"),
        ):
            answer = await gateway.request("POST", f"/v1/chat/completions{query}", CHAT, headers)
            assert answer.of(401)["error"]["message"] == "the request has two different API keys: send one"
        assert gateway.dispatcher.contexts == []


async def test_repeated_key_and_a_foreign_key_beside_it_are_accepted() -> None:
    async with serving(keys=Keys()) as gateway:
        for headers, query in (
            ({"Authorization": f"Bearer {GOOD}", "X-API-Key": GOOD}, ""),
            ({"Authorization": f"Bearer {GOOD}"}, f"?api_key={GOOD}"),
            # Anthropic's SDK sends both where both variables are set, and one may be another provider's.
            ({"Authorization": f"Bearer {GOOD}", "X-API-Key": "sk-ant-somebody"}, ""),
            ({"X-API-Key": GOOD}, "?q=weft_is_a_word"),
        ):
            assert await ask(gateway, headers, f"/v1/chat/completions{query}") == (200, "")
        assert {context.tenant for context in gateway.dispatcher.contexts} == {"ann"}


async def test_expired_or_revoked_key_is_rejected_and_a_rotating_one_accepted() -> None:
    now = datetime.now(UTC)
    keys = Keys(ring_of(verifier(expires_at=now - timedelta(seconds=1))))
    async with serving(keys=keys) as gateway:
        assert (await ask(gateway, bearer()))[0] == 401
        keys.ring = ring_of()
        assert (await ask(gateway, bearer()))[0] == 401
        turned: dict[str, Any] = {
            "previous_digest": key_digest(PEPPER, "7" * 64),
            "previous_expires_at": now + timedelta(hours=1),
        }
        keys.ring = ring_of(verifier(**turned))
        assert (await ask(gateway, bearer()))[0] == 200
        assert (await ask(gateway, bearer(secret="7" * 64)))[0] == 200
        keys.ring = ring_of(verifier(**turned | {"previous_expires_at": now - timedelta(seconds=1)}))
        assert (await ask(gateway, bearer(secret="7" * 64)))[0] == 401


async def test_request_gets_503_until_keys_are_loaded() -> None:
    async with serving(keys=Keys(is_ready=False)) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", CHAT, bearer())
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"


async def test_probes_need_no_key_and_metrics_do() -> None:
    async with serving(keys=Keys()) as gateway:
        assert (await gateway.request("GET", "/health")).status == 200
        assert (await gateway.request("GET", "/metrics")).status == 401
        assert (await gateway.request("GET", "/metrics", headers=bearer())).status == 403
        assert (await gateway.request("GET", "/nothing/here")).status == 401
        assert (await gateway.request("GET", "/nothing/here", headers=bearer())).status == 404
        assert (await gateway.request("DELETE", "/v1/chat/completions")).status == 401
        assert (await gateway.request("DELETE", "/v1/chat/completions", headers=bearer())).status == 405
        assert (await gateway.request("POST", "/health")).status == 405


async def test_signed_link_needs_no_key() -> None:
    """Rules by path asked for one, as the path has a parameter."""
    async with serving(keys=Keys(), files=MemoryFiles(), result_key=b"k" * 32) as gateway:
        answer = await gateway.request("GET", "/v1/results/file-1?tenant=a&expires=1&signature=x")
        assert answer.status == 404


async def test_tenant_comes_from_the_key_and_headers_cannot_change_it() -> None:
    async with serving(keys=Keys()) as gateway:
        assert (await ask(gateway, {**bearer(), "X-Tenant-ID": "ann"}))[0] == 200
        assert await ask(gateway, {**bearer(), "X-Tenant-ID": "bob"}) == (403, "permission_denied")
        assert [context.tenant for context in gateway.dispatcher.contexts] == ["ann"]


async def test_upstream_gateway_key_can_set_the_tenant() -> None:
    keys = Keys(["inference:create", "mesh:create"])
    async with serving(keys=keys) as gateway:
        assert (await ask(gateway, {**bearer(), "X-Tenant-ID": "bob"}))[0] == 200
        assert [context.tenant for context in gateway.dispatcher.contexts] == ["bob"]


async def test_allow_remote_requires_the_remote_scope() -> None:
    body = {**CHAT, "allow_remote": True}
    async with serving(keys=Keys()) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", body, bearer())
        assert answer.status == 403
        error = answer.error
        assert error["param"] == "allow_remote"
        assert "remote:create" in error["message"]
    keys = Keys([*DEFAULT_SCOPES, "remote:create"])
    async with serving(keys=keys) as gateway:
        assert (await gateway.request("POST", "/v1/chat/completions", body, bearer())).status == 200
        (context,) = gateway.dispatcher.contexts
        assert context.allow_remote


async def test_requests_carry_the_highest_priority_of_their_key() -> None:
    async with serving(keys=Keys(ring_of(verifier(max_priority=Priority.NORMAL)))) as gateway:
        answer = await gateway.request("POST", "/v1/chat/completions", CHAT, {**bearer(), "X-Priority": "high"})
        assert answer.status == 200
        (context,) = gateway.dispatcher.contexts
        assert (context.priority, context.max_priority) == (Priority.HIGH, Priority.NORMAL)


async def test_keyed_change_from_another_host_is_allowed_and_from_a_foreign_page_rejected() -> None:
    keys = Keys(["models:edit"])
    config = GatewayConfig(port=0, allowed_hosts=frozenset({"weft.example.org"}))
    async with serving(keys=keys, config=config) as gateway:
        headers = {**bearer(), "Host": "weft.example.org"}
        assert (await gateway.request("DELETE", "/api/v1/models/tiny", headers=headers)).status == 204
        headers["Origin"] = "https://evil.example"
        assert (await gateway.request("DELETE", "/api/v1/models/tiny", headers=headers)).status == 403
