"""No role imports what only another role, or a rare request, needs: each start of every process would pay for it."""

import json
import subprocess
import sys

import pytest

DOCUMENTS = ("fastapi",)
"""For the OpenAPI document, when it is first asked for."""
PRETTY = ("rich.console", "pygments")
"""For terminals."""
WEB = ("starlette", "uvicorn", "prometheus_client", "gateway.app", "gateway.endpoints")
STORES = ("sqlalchemy", "aiosqlite", "alembic")
RARE = (
    *(
        "aiohttp",
        "mcp",
        "jsonschema",
        "jinja2",
        "alembic",
        "asyncpg",
        "cryptography",
        "joserfc",
        "xllamacpp",
        "zeroconf",
    ),
    *("sqlalchemy.dialects.postgresql", "opentelemetry.exporter", "gateway.media.fetcher"),
    *("sqlalchemy.orm", "uvicorn.main", "uvicorn.supervisors", "click", "prometheus_client.exposition", "http.server"),
)
"""For a feature that a configuration turns on, or a request that asks for it."""
SERVICES = ("registry_svc.service", "router_svc.service", "gateway.service", "runner_svc.service")
INSTANCES = ("runner_svc.session.session", "runner_svc.instance.instance", "runner_svc.model_files")


def others(own: str) -> tuple[str, ...]:
    return tuple(service for service in SERVICES if service != own)


ROLES = {
    "weft_app.cli.up, weft_app.compose.up": (*DOCUMENTS, *PRETTY, *RARE, *INSTANCES, "runner_svc.service"),
    "weft_app.cli.serve, weft_app.compose.registry": (
        *DOCUMENTS,
        *PRETTY,
        *WEB,
        *RARE,
        *others("registry_svc.service"),
    ),
    "weft_app.cli.serve, weft_app.compose.router": (*DOCUMENTS, *PRETTY, *WEB, *RARE, *others("router_svc.service")),
    "weft_app.cli.serve, weft_app.compose.gateway": (
        *(*DOCUMENTS, *PRETTY, *STORES, *RARE),
        *others("gateway.service"),
    ),
    "weft_app.cli.serve, weft_app.compose.runner": (
        *(*DOCUMENTS, *PRETTY, *WEB, *STORES, *RARE),
        *("weft.dispatch.dispatcher", "weft.dispatch.fleet"),
        *others("runner_svc.service"),
    ),
    "weft_app.config.config": (
        *(*DOCUMENTS, *PRETTY, *WEB, *STORES, *RARE, *SERVICES),
        *("google.protobuf", "weft.api", "weft.dispatch"),
    ),
}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.rpartition(".")[2])
def test_a_role_imports_nothing_that_only_others_need(role: str) -> None:
    program = f"import json, sys, {role}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    found = [
        name for name in imported if any(name == refused or name.startswith(f"{refused}.") for refused in ROLES[role])
    ]
    assert found == []
