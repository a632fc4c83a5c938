"""`weft describe`: everything known about one resource."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.documents.resource_kinds import ResourceKind, listed_kinds
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft.kernel.reasons import NO_REGISTRY
from weft_app.cli.completion import complete_described
from weft_app.cli.mesh_documents import Document, MeshDocuments, connect_documents
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import print_page, say, table_block
from weft_app.cli.targets import REQUEST_WORDS, TASK_WORDS, one_named, tenants_named

_REQUESTED_AS: Mapping[str, str] = {
    ResourceKind.MODEL: "",
    ResourceKind.POOL: "",
    ResourceKind.AGENT: AGENT_PREFIX,
    ResourceKind.ROUTE: ROUTE_PREFIX,
    ResourceKind.WORKFLOW: WORKFLOW_PREFIX,
}
"""What begins the name of a kind where a request asks for it."""
LOG_LINES = 10
EVENTS = 10


def describe(
    resources: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] NAME",
            help=f"A {listed_kinds(plural=False)}, request or task: KIND NAME, KIND/NAME or NAME.",
            autocompletion=complete_described,
        ),
    ],
    output: PageOutputOption = OutputFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show the details of one resource: its document, conditions with reasons, engines and recent events.

    With -o json or yaml: the resource, its events, and its runner's own description.

    The kind can be left out where one kind alone has the name.

    Example: weft describe model qwen
    """
    kind, _, name = resources[0].partition("/")
    if kind.lower() in TASK_WORDS:
        from weft_app.cli.tasks import describe_task  # noqa: PLC0415 - tasks are read over gRPC

        describe_task(resources, output, home)
    elif kind.lower() in REQUEST_WORDS:
        from weft_app.cli.explain import show_request  # noqa: PLC0415 - as tasks

        names = [*filter(None, [name]), *resources[1:]]
        if len(names) != 1:
            raise invalid_field("ID", "name one request, as request ID or request/ID")
        show_request(names[0], output, home)
    else:
        _describe_resource(resources, output, home)


def _describe_resource(words: list[str], output: OutputFormat, home: Path) -> None:
    try:
        with connect_documents(home) as mesh:
            target = one_named(mesh, words)
            document = mesh.document(target.kind, target.name)
            events = mesh.events(target.kind, document["name"], EVENTS)
            instances = _instances(mesh, document)
            users = _users(mesh, document) if output is OutputFormat.TABLE else []
    except WeftError as error:
        tenants = tenants_named(words)
        if error.reason not in NO_REGISTRY or output is not OutputFormat.TABLE or tenants is None or len(tenants) != 1:
            raise
        from weft_app.cli.limit_uses import KnownUses  # noqa: PLC0415 - of tenants alone

        say(KnownUses(home, error, tenants).page())
        return
    uses = None
    if target.kind is ResourceKind.TENANT:
        from weft_app.cli.limit_uses import limit_uses  # noqa: PLC0415 - as above

        uses = limit_uses(home, document["name"])
    print_page(
        output,
        lambda: _page(document, events, instances, uses, users),
        lambda: _whole(document, events, instances, uses),
    )


def _users(mesh: MeshDocuments, document: Document) -> list[Document]:
    """Returns the agents, routes and aliases that lead to a resource; kinds that cannot be read are left out."""
    found: list[Document] = []
    if document["kind"] in _REQUESTED_AS:
        for kind in (ResourceKind.AGENT, ResourceKind.ROUTE, ResourceKind.ALIAS):
            with suppress(WeftError):
                found += (each for each in mesh.documents(kind) if _leads_to(each, document))
    return found


def _leads_to(user: Document, document: Document) -> bool:
    name = document["name"]
    if user["kind"] == ResourceKind.ALIAS:
        return bool(user["target"] == _REQUESTED_AS[document["kind"]] + name)
    if _REQUESTED_AS[document["kind"]]:
        return False
    names = {name, document["status"].get("pool", name)}
    if user["kind"] == ResourceKind.ROUTE:
        return not names.isdisjoint(user["candidates"])
    return user.get("pool") in names or user.get("model") in {name, *document.get("members", ())}


def _page(
    document: Document, events: list[Document], instances: list[Document] | None, uses: Any, users: list[Document]
) -> str:
    from weft_app.cli.description import description  # noqa: PLC0415 - documents need none

    text = description(document, events, instances, users)
    if uses:
        from weft_app.cli.limit_uses import USES  # noqa: PLC0415 - of tenants alone

        text += "\n".join((*table_block("Used", USES, uses), ""))
    return text


def _whole(document: Document, events: list[Document], instances: list[Document] | None, uses: Any) -> dict[str, Any]:
    """Returns all of it as JSON types: the resource, its events, and its runner's own description."""
    runner = None if instances is None else {"instances": instances}
    whole = {"resource": document, "events": events, "runner": runner}
    return whole if uses is None else whole | {"uses": uses}


def _instances(mesh: MeshDocuments, document: Document) -> list[Document] | None:
    """Returns what the runner that a document is about says of its engines; None: there is none that answers."""
    kind = document["kind"]
    runner = document["name"] if kind == ResourceKind.RUNNER else document["status"].get("runner")
    if not runner or kind not in (ResourceKind.RUNNER, ResourceKind.MODEL):
        return None
    with suppress(WeftError):
        return mesh.instances(runner, LOG_LINES)
    return None
