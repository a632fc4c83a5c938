"""Shell completion of kinds and names of the running mesh. Timeouts are short, and errors are ignored."""

from itertools import islice
from typing import TYPE_CHECKING, Any

import typer

from weft.documents.resource_kinds import ResourceKind, kind_words
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.extension_commands import kinds_off_here
from weft_app.cli.options import DEFAULT_HOME
from weft_app.cli.targets import ALL, record_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from weft_app.cli.mesh_api import MeshApi

CALL_TIMEOUT_SECONDS = 0.25
"""Timeout per call: a completion makes up to five, and must end within a second even on a slow host."""
MAX_OFFERED = 1000
CANCELLED_KINDS = ("requests", "tasks", "batches", "operations")
SHOWN = ("clients", "requests", "tasks", "leases", "routers", ALL)
"""Further kinds of `weft get`. Their names change constantly and are not completed."""
_PREFIXES = {"agent/": ResourceKind.AGENT, "route/": ResourceKind.ROUTE, "workflow/": ResourceKind.WORKFLOW}
KEYS, SECRETS = "/api/v1/keys", "/v1/admin/secrets"


def complete_resource(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes a kind, then its names; also KIND/NAME."""
    words = _words_of(ctx)
    kind_word, slash, _ = incomplete.partition("/")
    if slash and kind_word.lower() in kind_words():
        names = _names(ctx, kind_words()[kind_word.lower()])
        return _offer((f"{kind_word}/{name}" for name in names), incomplete)
    kinds = [kind_words()[word.lower()] for word in words[:1] if word.lower() in kind_words()]
    if not kinds:
        off = kinds_off_here()
        return _offer((kind.plural for kind in ResourceKind if kind not in off), incomplete)
    return _offer(_names(ctx, kinds[0]), incomplete)


def _words_of(ctx: typer.Context) -> list[str]:
    """Returns the words of a command, starting at the kind if unknown options precede it."""
    words = list(ctx.params.get("resources") or ())
    if not any(word.startswith("-") for word in words):
        return words
    known = (index for index, word in enumerate(words) if word.lower() in kind_words() or record_kind(word) == "task")
    return words[next(known, len(words)) :]


def complete_named(ctx: typer.Context, incomplete: str) -> list[str]:
    """As `complete_resource`, but completes names of every kind if no kind matches."""
    offered = complete_resource(ctx, incomplete)
    if offered or _words_of(ctx) or "/" in incomplete:
        return offered
    return _offer(sorted(set(_names(ctx, *ResourceKind))), incomplete)


def _beside(
    own: "Callable[[typer.Context, str], list[str]]", kinds: "Collection[str]", offered: "Collection[str]"
) -> "Callable[[typer.Context, str], list[str]]":
    """Extends `own` by `offered` as first words. Words after one of `kinds` are not completed."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        given = _words_of(ctx)
        if given and record_kind(given[0]) in kinds:
            return []
        return [*own(ctx, incomplete), *([] if given else _offer(offered, incomplete))]

    return complete


complete_shown = _beside(complete_named, ("request", "client", "task", "lease", "router"), SHOWN)
complete_described = _beside(complete_named, ("task",), ["tasks"])
complete_with_tasks = _beside(complete_resource, ("task",), ["tasks"])


def complete_cancelled_kind(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes kinds that can be cancelled."""
    return [] if ctx.params.get("words") else _offer(CANCELLED_KINDS, incomplete)


def complete_restarted(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes the word `model`, then names of models."""
    return complete_model(ctx, incomplete) if ctx.params.get("model") else _offer(["model"], incomplete)


def _completing(ask: "Callable[[MeshApi], Iterable[str]]") -> "Callable[[typer.Context, str], list[str]]":
    """Returns a completion of names in a mesh."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _offer(_asked(ctx, lambda mesh: list(islice(ask(mesh), MAX_OFFERED))), incomplete)

    return complete


complete_model = _completing(lambda mesh: mesh.names(ResourceKind.MODEL))
complete_trial = _completing(lambda mesh: mesh.names(ResourceKind.TRIAL))
complete_key_id = _completing(lambda mesh: (key["id"] for key in mesh.get(KEYS)["items"] if "revokeTime" not in key))
complete_secret = _completing(lambda mesh: (secret["name"] for secret in mesh.get(SECRETS)["items"]))


def complete_logged(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names with logs: the mesh, its services, runners with files in the home, and models."""
    from weft_app.cli.mesh_logs import RUNNER_PREFIX, LogFolder  # noqa: PLC0415 - other completions read no files
    from weft_app.compose.home import WeftHome  # noqa: PLC0415 - as above

    if ctx.params.get("words"):
        return []
    folder = LogFolder(WeftHome((ctx.params.get("home") or DEFAULT_HOME).expanduser().absolute()))
    try:
        if incomplete.startswith(RUNNER_PREFIX):
            return _offer((f"{RUNNER_PREFIX}{name}" for name in folder.runners()), incomplete)
        own = folder.names()
    except WeftError:
        own = ()
    return _offer(sorted({*own, *_names(ctx, ResourceKind.MODEL)}), incomplete)


def complete_chat_target(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of models, pools, agents, routes, workflows and aliases."""
    for prefix, kind in _PREFIXES.items():
        if incomplete.startswith(prefix):
            return _offer((f"{prefix}{name}" for name in _names(ctx, kind)), incomplete)
    kinds = (ResourceKind.MODEL, ResourceKind.POOL, ResourceKind.AGENT, ResourceKind.ALIAS)
    return _offer(sorted(set(_names(ctx, *kinds))), incomplete)


FIRST_WORDS: "Mapping[str, Callable[[typer.Context, str], list[str]]]" = {
    "chat": complete_chat_target,
    "load": complete_model,
    "logs": complete_logged,
    "run": complete_chat_target,
    "unload": complete_model,
}
"""Completion of the first word of commands with slow imports."""
NAMES = {"delete": complete_with_tasks, "config edit": complete_named, "mesh wait": complete_with_tasks}
"""Completion of every word of such commands."""


def _names(ctx: typer.Context, *kinds: ResourceKind) -> list[str]:
    return _asked(ctx, lambda mesh: [name for kind in kinds for name in islice(mesh.names(kind), MAX_OFFERED)])


def _asked(ctx: typer.Context, ask: "Callable[[MeshApi], list[Any]]") -> list[Any]:
    try:
        from weft_app.cli.mesh_api import connect  # noqa: PLC0415 - most completions need no mesh

        with connect(ctx.params.get("home") or DEFAULT_HOME, CALL_TIMEOUT_SECONDS) as mesh:
            return ask(mesh)
    except (WeftError, OSError, ValueError):
        # Completion must not print errors into a half-typed command line.
        return []


def _offer(words: "Iterable[str]", incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)][:MAX_OFFERED]
