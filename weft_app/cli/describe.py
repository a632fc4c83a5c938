"""`weft describe`: everything known about one resource."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, TypeVar

import typer

from weft.client.resources import Registry, connect_registry, describe_runner
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    AgentDocument,
    AliasDocument,
    AnyDocument,
    ModelDocument,
    PoolDocument,
    RouteDocument,
    RunnerDocument,
)
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft_app.cli.completion import complete_described
from weft_app.cli.description import Facts, Rung, description, facts_document
from weft_app.cli.explain import show_request
from weft_app.cli.limit_uses import NO_REGISTRY, KnownUses, limit_uses
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import print_page, say
from weft_app.cli.targets import REQUEST_WORDS, Target, find, one_named, tenants_named
from weft_app.cli.tasks import describe_task, is_about_tasks

T = TypeVar("T")
LOG_LINES = 10
EVENTS = 10


def describe(
    resources: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] NAME",
            help="A model, agent, runner, pool, route, alias, profile, workflow, tenant, request or task: KIND NAME, "
            "KIND/NAME or NAME.",
            autocompletion=complete_described,
        ),
    ],
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the details of one resource: conditions with reasons, pool, process, recent events.

    With -o json or yaml: the resource, its events, and its runner's own description.

    The kind can be left out where one kind alone has the name.

    Example: weft describe model qwen
    """
    if is_about_tasks(resources):
        describe_task(resources, output, home)
        return
    kind, _, name = resources[0].partition("/")
    if kind.lower() in REQUEST_WORDS:
        names = [*filter(None, [name]), *resources[1:]]
        if len(names) != 1:
            raise invalid_field("ID", "name one request, as request ID or request/ID")
        show_request(names[0], output, home)
        return
    try:
        with connect_registry(home=home) as registry:
            facts = gather(registry, one_named(registry, resources))
    except WeftError as error:
        tenants = tenants_named(resources)
        if error.reason not in NO_REGISTRY or output is not OutputFormat.TABLE or tenants is None or len(tenants) != 1:
            raise
        say(KnownUses(home, error, tenants).page())
        return
    if facts.document.kind is ResourceKind.TENANT:
        facts = replace(facts, uses=limit_uses(home, facts.document.name))
    print_page(output, lambda: description(facts), lambda: facts_document(facts))


def gather(registry: Registry, target: Target) -> Facts:
    """Collects what is known about a resource; related facts that cannot be fetched are left out."""
    document = find(registry, target)
    pool = _pool(registry, document)
    address = _runner_address(registry, document)
    return Facts(
        document=document,
        pool=pool,
        agents=_agents(registry, document, pool),
        routes=_routes(registry, document, pool),
        aliases=_aliases(registry, document),
        rungs=_rungs(registry, document),
        runner=describe_runner(address, LOG_LINES) if address else None,
        events=_or_none(lambda: registry.events(target.kind, document.name, EVENTS)) or [],
    )


def _pool(registry: Registry, document: AnyDocument) -> PoolDocument | None:
    match document:
        case ModelDocument():
            return registry.members(document.name)
        case PoolDocument():
            return document
        case AgentDocument(declared=manifest) if manifest.pool:
            found = _find_or_none(registry, Target(ResourceKind.POOL, manifest.pool))
        case AgentDocument(declared=manifest):
            found = _or_none(lambda: registry.members(manifest.model))
        case _:
            return None
    return found if isinstance(found, PoolDocument) else None


def _agents(registry: Registry, document: AnyDocument, pool: PoolDocument | None) -> list[AgentDocument]:
    """Returns the agents that point to a model or a pool."""
    if not isinstance(document, ModelDocument | PoolDocument):
        return []
    agents = [agent for agent in registry.documents(ResourceKind.AGENT) if isinstance(agent, AgentDocument)]
    pools = {pool.name} if pool is not None else set()
    models = {document.name} if isinstance(document, ModelDocument) else set(document.declared.members)
    return [agent for agent in agents if agent.declared.pool in pools or agent.declared.model in models]


def _routes(registry: Registry, document: AnyDocument, pool: PoolDocument | None) -> list[RouteDocument]:
    """Returns the routes that name a model, its pool, or a pool."""
    if not isinstance(document, ModelDocument | PoolDocument):
        return []
    names = {document.name} if pool is None else {document.name, pool.name}
    routes = [route for route in registry.documents(ResourceKind.ROUTE) if isinstance(route, RouteDocument)]
    return [route for route in routes if not names.isdisjoint(route.declared.candidates)]


_REQUESTED_AS: Mapping[ResourceKind, str] = MappingProxyType(
    {
        ResourceKind.MODEL: "",
        ResourceKind.POOL: "",
        ResourceKind.AGENT: AGENT_PREFIX,
        ResourceKind.ROUTE: ROUTE_PREFIX,
        ResourceKind.WORKFLOW: WORKFLOW_PREFIX,
    }
)
"""What begins the name of a kind where a request asks for it."""


def _aliases(registry: Registry, document: AnyDocument) -> list[AliasDocument]:
    """Returns the aliases that lead to a resource."""
    prefix = _REQUESTED_AS.get(document.kind)
    if prefix is None:
        return []
    aliases = [each for each in registry.documents(ResourceKind.ALIAS) if isinstance(each, AliasDocument)]
    return [alias for alias in aliases if alias.declared.target == f"{prefix}{document.name}"]


def _rungs(registry: Registry, document: AnyDocument) -> list[Rung]:
    """Returns the state of a route's candidates: a pool takes precedence over a model of the same name."""
    if not isinstance(document, RouteDocument):
        return []
    return [_rung(registry, name) for name in document.declared.candidates]


def _rung(registry: Registry, name: str) -> Rung:
    for kind in (ResourceKind.POOL, ResourceKind.MODEL):
        found = _find_or_none(registry, Target(kind, name))
        match found:
            case PoolDocument(observed=pool) if pool is not None and (pool.explicit or pool.size > 1):
                return Rung(name, f"pool, {pool.active_count} of {pool.size} active")
            case ModelDocument(observed=model) if model is not None:
                return Rung(name, f"{found.state}, remote" if found.manifest.remote else found.state)
    return Rung(name, "not there now")


def _runner_address(registry: Registry, document: AnyDocument) -> str | None:
    if isinstance(document, ModelDocument) and document.observed and document.observed.runner:
        found = _find_or_none(registry, Target(ResourceKind.RUNNER, document.observed.runner))
    else:
        found = document
    if not isinstance(found, RunnerDocument) or found.observed is None or found.state != "active":
        return None
    return found.observed.address


def _find_or_none(registry: Registry, target: Target) -> AnyDocument | None:
    return _or_none(lambda: registry.document(target.kind, target.name))


def _or_none(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except WeftError:
        return None
