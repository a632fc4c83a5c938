"""Who may call what: each HTTP route and each rpc, by each kind of caller, is admitted as `authorization.txt` says.

The gate of the HTTP edge and the interceptor of the gRPC servers decide. What a servicer decides afterwards, by the
names, kinds or tenant in a request, has its own tests.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.keys import as_key, ring
from starlette.requests import Request

import weft.api
from gateway.auth.authentication import HOME_SOCKET, OWN_USER_KEY, Gate
from gateway.endpoints import gateway_routers
from gateway.request_facts import FACTS_KEY, RequestFacts
from gateway.routing import Needs, needs_of, routes_of
from gateway.runner_api_service import runner_routers
from weft.extension import own_extensions
from weft.kernel.access.principal import LOCAL, MESH_ACCESS, Principal
from weft.kernel.access.rpc_auth import AuthInterceptor, UserGuard, access_of, as_caller, caller, checks_kind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.keys import KeyRole, scopes_of
from weft_testing.fake_clock import FakeClock

TABLE = Path(__file__).with_name("authorization.txt")
SCOPES = {
    "named": ("inference/team-*:*", "models/team-*:*", "operations/team-*:*"),
    **{role.value: scopes_of(role) for role in KeyRole},
}
"""Scopes of the callers with a key. Runners, routers and standbys have one of the role `service`, or a certificate."""
OTHER = "other"
"""Another user of the machine, over loopback, where no keys are required."""
CALLERS = ("none", "join", *SCOPES, "local", OTHER, "certificate")
OUTCOMES = {Reason.UNAUTHENTICATED: "401", Reason.PERMISSION_DENIED: "403"}
RING = ring({name.ljust(12, "0"): scopes for name, scopes in SCOPES.items()})


def credentials_of(who: str) -> tuple[tuple[str, str], ...]:
    if who in SCOPES:
        return as_key(who.ljust(12, "0"))
    return (("authorization", "Bearer a-valid-join-token"),) if who == "join" else ()


class Call:
    """What gRPC says about a call of a caller."""

    def __init__(self, who: str) -> None:
        self._who = who

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return credentials_of(self._who)

    def peer(self) -> str:
        return "unix:/run/weft.sock" if self._who == "local" else "ipv4:192.0.2.1:5000"

    def auth_context(self) -> Mapping[str, tuple[bytes, ...]]:
        return {"peer_uri": (b"weft://mesh/runner-1",)} if self._who == "certificate" else {}


def principal_of(method: str, who: str) -> Principal:
    """Who a servicer is told that the caller is. Raises as the interceptor."""
    guard = UserGuard() if who == OTHER else AuthInterceptor(lambda: RING, FakeClock())
    with as_caller(LOCAL):
        guard.check(method, Call(who))  # type: ignore[arg-type]
        return caller()


def rpc_outcome(method: str, who: str) -> str:
    """`ok`, the status of a refusal, or `name` or `kind` if the servicer checks the names or kinds in the request."""
    if (access := access_of(method)) is None:
        return "ok"
    try:
        principal = principal_of(method, who)
    except WeftError as error:
        return OUTCOMES[error.reason]
    if checks_kind(method):
        return "kind"
    return "ok" if principal.may(access) else "name"


async def http_outcome(needs: Needs, who: str) -> str:
    """As `rpc_outcome`."""
    if who == "certificate":
        return "-"  # the HTTP edge asks for no certificates
    keys: Any = SimpleNamespace(ring=RING, is_ready=True)
    headers = [(name.encode(), value.encode()) for name, value in credentials_of(who)]
    facts = RequestFacts.__new__(RequestFacts)
    scope: dict[str, Any] = {"type": "http", "headers": headers, "query_string": b"", FACTS_KEY: facts}
    scope |= {
        "app": SimpleNamespace(gate=Gate(None if who == OTHER else keys, FakeClock())),
        "state": {OWN_USER_KEY: lambda: who != OTHER},
        HOME_SOCKET: who == "local",
    }
    try:
        await needs(Request(scope))
    except WeftError as error:
        return OUTCOMES[error.reason]
    if needs.key:
        return "kind"
    return "ok" if needs.access is None or facts.principal.may(needs.access) else "name"


def routes() -> Iterator[tuple[str, Needs]]:
    served: dict[tuple[str, str], list[str]] = {}
    needs: dict[tuple[str, str], Needs] = {}
    for server, routers in (
        ("gateway", gateway_routers(own_extensions())),
        ("runner", runner_routers(own_extensions())),
    ):
        for route in routes_of(routers):
            for method in route.methods or ():
                served.setdefault((method, route.path), []).append(server)
                assert needs.setdefault((method, route.path), needs_of(route)) == needs_of(route)
    for (method, path), servers in served.items():
        yield f"{'+'.join(servers)} {method} {path}", needs[method, path]


def rpcs() -> Iterator[str]:
    yield from ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    for info in pkgutil.walk_packages(weft.api.__path__, "weft.api."):
        if info.name.endswith("_service_pb2"):
            for service in importlib.import_module(info.name).DESCRIPTOR.services_by_name.values():
                yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


async def actual() -> dict[str, list[str]]:
    """The outcomes of each route and rpc, in the order of CALLERS."""
    found = {where: [await http_outcome(needs, who) for who in CALLERS] for where, needs in routes()}
    for method in rpcs():
        found[f"rpc {method.removeprefix('/weft.api.')}"] = [rpc_outcome(method, who) for who in CALLERS]
    return found


def expected() -> dict[str, list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    rows = {(words := line.rsplit(maxsplit=len(CALLERS)))[0]: words[1:] for line in lines}
    assert len(rows) == len(lines), "a row is there twice"
    assert rows.pop("caller") == list(CALLERS)
    return rows


def line_of(where: str, outcomes: list[str]) -> str:
    return f"{where:<68} {' '.join(f'{outcome:<8}' for outcome in outcomes)}".rstrip()


async def test_each_route_and_rpc_has_a_row_and_admits_exactly_its_callers() -> None:
    found, rows = await actual(), expected()
    assert len(found) > 250
    wrong = [f"decide who may call it, and add: {line_of(*row)}" for row in found.items() if row[0] not in rows]
    wrong += [f"remove the row of what is gone: {where}" for where in rows if where not in found]
    wrong += [
        f"{who} gets {outcome} and not {wanted}: {where}"
        for where in found.keys() & rows.keys()
        for who, outcome, wanted in zip(CALLERS, found[where], rows[where], strict=True)
        if outcome != wanted
    ]
    assert not wrong, f"{TABLE.name} differs:\n" + "\n".join(sorted(wrong))


def test_only_services_and_local_callers_act_for_another_tenant() -> None:
    may = set()
    for who in CALLERS[2:]:
        with suppress(WeftError):
            principal_of("/weft.api.registry.v1.RegistryService/ListResources", who).tenant_for("bob", "tenant")
            may.add(who)
    assert may == {"service", "local", OTHER, "certificate"}


@pytest.mark.parametrize(
    "method",
    ["weft.api.router.v1.NewService/Anything", "weft.api.router.v1.TaskService/Anything", "os.path/join", "/"],
)
def test_unknown_rpc_is_for_services_only(method: str) -> None:
    assert access_of(f"/{method}") == MESH_ACCESS
