"""No role imports what only another role, or a rare request, needs: each start of every process would pay for it."""

import pytest
from kit.forked_programs import Program, run_forked

pytestmark = pytest.mark.slow("imports each service in a process of its own: 9 s of CPU time")
PRETTY = ("rich.console", "pygments")
"""For terminals."""
WEB = ("fastapi", "starlette", "uvicorn", "prometheus_client", "gateway.app", "gateway.endpoints")
STORES = ("weft.sql.store",)
RARE = (
    *(
        "aiohttp",
        "mcp",
        "jsonschema",
        "jinja2",
        "psycopg",
        "cryptography",
        "joserfc",
        "xllamacpp",
        "zeroconf",
    ),
    *("opentelemetry.exporter", "gateway.media.fetcher"),
    *("mcp_types", "referencing", "httpx2"),
)
"""For a feature that a configuration turns on, or a request that asks for it."""
SERVICES = (
    "registry_svc.registry_service",
    "router_svc.router_service",
    "gateway.gateway_service",
    "runner_svc.runner_service",
)
INSTANCES = ("runner_svc.session.session", "runner_svc.instance.instance", "runner_svc.model_files")


def others(own: str) -> tuple[str, ...]:
    return tuple(service for service in SERVICES if service != own)


ROLES = {
    "weft_app.cli.up, weft_app.compose.up": (*PRETTY, *RARE, *INSTANCES, "runner_svc.runner_service"),
    "weft_app.cli.serve, weft_app.compose.registry": (
        *PRETTY,
        *WEB,
        *RARE,
        *others("registry_svc.registry_service"),
    ),
    "weft_app.cli.serve, weft_app.compose.router": (*PRETTY, *WEB, *RARE, *others("router_svc.router_service")),
    "weft_app.cli.serve, weft_app.compose.gateway": (
        *(*PRETTY, *STORES, *RARE),
        *others("gateway.gateway_service"),
    ),
    "weft_app.cli.serve, weft_app.compose.runner": (
        *(*PRETTY, *WEB, *STORES, *RARE),
        *("weft.dispatch.dispatcher", "weft.dispatch.fleet", "anyio"),
        *others("runner_svc.runner_service"),
    ),
    "weft_app.config.config": (
        *(*PRETTY, *WEB, *STORES, *RARE, *SERVICES),
        *("google.protobuf", "weft.api", "weft.dispatch"),
    ),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, frozenset[str]]:
    """Returns what each role imports. All of them read the configuration."""
    programs = [Program(f"import {role}") for role in ROLES]
    ended = run_forked(programs, tmp_path_factory.mktemp("roles"), shared="import weft_app.config.config")
    assert [each.stderr for each in ended] == [""] * len(ROLES)
    return {role: each.modules for role, each in zip(ROLES, ended, strict=True)}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.rpartition(".")[2])
def test_role_imports_no_modules_of_other_roles(role: str, imported: dict[str, frozenset[str]]) -> None:
    found = [
        name
        for name in sorted(imported[role])
        if any(name == refused or name.startswith(f"{refused}.") for refused in ROLES[role])
    ]
    assert found == []
