"""Extensions: what adds to weft by declared hooks, without any import of it in the core.

weft's own are the folders of `weft_extensions` that have a module `extension` with an EXTENSION. Another package adds
one by an entry point from its name to its EXTENSION:

    [project.entry-points."weft.extensions"]
    my_extension = "my_package.extension:EXTENSION"

A descriptor loads quickly: its hooks are places, `module:NAME`, imported at their first use, and it consists of named
tuples, which Python defines in a seventh of the time of a dataclass.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE = "weft_extensions"
"""Its folders are weft's own extensions."""
ENTRY_POINT_GROUP = "weft.extensions"
Hook = TypeVar("Hook")


class ApiHook(NamedTuple):
    """An HTTP API of a gateway."""

    place: str
    """Of a `gateway.http_api.HttpApi`."""
    paths: tuple[str, ...]
    """Its paths; one that ends with `/` and is longer stands for all below it. The first request imports the API."""
    is_of_runners: bool = False
    """Whether a runner's HTTP API serves it too: its handlers need no more than `gateway.deps.InferenceDeps`."""


class TaskApiHook(NamedTuple):
    """Requests of an HTTP API as durable tasks and in batches."""

    endpoint: str
    """Path of the live endpoint, such as `/v1/chat/completions`."""
    kind: str
    """`TaskSpec.origin_kind` of these tasks."""
    place: str
    """Of a `gateway.tasks.task_apis.TaskApi`."""


class CommandHook(NamedTuple):
    """A command of the command line."""

    words: str
    """The words after `weft`, such as `mesh simulate`."""
    summary: str
    """First paragraph of its help."""
    place: str = ""
    """Of a function with typer's annotations, or of a `typer.Typer` with commands. Empty: the group of
    the commands that other hooks name."""
    example: str = ""
    """Of a group of commands: shown in its help."""


class RuntimeHook(NamedTuple):
    """A kind of engine."""

    name: str
    """Value of `runtime` of a runner in weft.yaml."""
    place: str
    """Of a `runner_svc.runtimes.runtime.Runtime` with this name."""


class ListenerHook(NamedTuple):
    """A listener of each router with a relay, for programs that join a mesh in another way than weft's runners do."""

    place: str
    """Of a function from `weft_app.compose.join_listeners.JoinParts` to a `JoinListener`, or None: it is not wanted."""
    label: str
    """First word of its line in what `weft up` prints, up to 9 letters."""
    summary: str
    """The rest of that line, before its URL, such as "programs register over HTTP"."""
    setting: str = ""
    """The setting of weft.yaml with its address, such as `publishers.listen`: the place is imported only if it is set.
    Empty: the function decides."""

    def address(self, config: object) -> str | None:
        """Returns the value of its setting in a configuration; None: it is not set."""
        found: object = reduce(lambda section, name: getattr(section, name, None), self.setting.split("."), config)
        return found if isinstance(found, str) else None


class ObserverHook(NamedTuple):
    """Gets ended requests in each process that runs some: gateways, and routers for those over gRPC and of tasks."""

    place: str
    """Of a function from `weft.durable.ended_requests.ObserverParts` to a `RequestObserver`."""


class PageHook(NamedTuple):
    """A page of the workbench."""

    path: str
    """First word of its path below `/ui/`: small letters. Its files are served in `app/extensions/PATH/`."""
    title: str
    group: str
    """Its group in the navigation, such as "Mesh"."""
    needs: str
    """The right without which it is not shown, such as "models:view"."""
    package: str
    """Package with the files of the page in its folder `page`."""
    module: str
    """Name of the JavaScript module there that exports `Page`."""
    icon: str
    """An SVG path on 16 x 16, drawn as a stroke."""
    keys: tuple[tuple[tuple[str, ...], str], ...] = ()
    """Its keyboard shortcuts, for the list of all: the keys, and what they do."""


class ServerToolHook(NamedTuple):
    """A tool that a gateway runs for models, such as a web search."""

    name: str
    """The beginning of its types in requests, such as `web_search` of `web_search_20250305`. The APIs have blocks and
    items for `web_search` and `web_fetch` alone: others are not offered to models so far."""
    place: str
    """Of a `gateway.server_tools.tool.ServerToolKind`; the first request for the tool imports it."""


class Extension(NamedTuple):
    """What one extension is and adds."""

    name: str
    """Letters, digits and underscores; its word in `extensions.disabled`."""
    summary: str
    """One line for `weft doctor` and the docs."""
    docs: str
    """Documentation: a path in weft's docs, or a URL."""
    requires: tuple[str, ...] = ()
    """Extensions without which it is disabled too."""
    apis: tuple[ApiHook, ...] = ()
    """HTTP APIs of a gateway."""
    task_apis: tuple[TaskApiHook, ...] = ()
    """APIs whose requests can be tasks."""
    commands: tuple[CommandHook, ...] = ()
    """Commands of the command line."""
    runtimes: tuple[RuntimeHook, ...] = ()
    """Kinds of engines."""
    listeners: tuple[ListenerHook, ...] = ()
    """Listeners of routers."""
    observers: tuple[ObserverHook, ...] = ()
    """Observers of requests."""
    pages: tuple[PageHook, ...] = ()
    """Pages of the workbench."""
    kinds: tuple[str, ...] = ()
    """Kinds of resources that are off with it: modules of `weft/documents/kinds`, so only those of weft's own."""
    server_tools: tuple[ServerToolHook, ...] = ()
    """Tools that a gateway runs for models."""


class FoundExtension(NamedTuple):
    """An extension of this installation."""

    name: str
    package: str
    """Package and version, such as "weft 0.1.0"; the entry point's value if they are unknown."""
    extension: Extension | None
    """None: it cannot be used."""
    fault: str = ""
    """Why it cannot be used."""


@lru_cache
def own_extensions() -> tuple[Extension, ...]:
    """Returns weft's own extensions, by name."""
    from pkgutil import iter_modules  # noqa: PLC0415 - a command that needs no extension imports little

    spec = find_spec(PACKAGE)
    folders = () if spec is None else tuple(spec.submodule_search_locations or ())
    names = (each.name for each in iter_modules(list(folders)) if each.ispkg)
    return tuple(load_hook(f"{PACKAGE}.{name}.extension:EXTENSION", Extension) for name in sorted(names))


@lru_cache
def installed_extensions() -> tuple[FoundExtension, ...]:
    """Returns the extensions of other packages. Imports their descriptors; never raises.

    Reading the packages of an environment takes 20 ms; of two with the same name both are unusable.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - see own_extensions

    found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda each: (each.name, _package_of(each)))
    names = [each.name for each in own_extensions()] + [each.name for each in found]
    return tuple(_inspect(each, is_twice=names.count(each.name) > 1) for each in found)


def all_extensions() -> tuple[Extension, ...]:
    """Returns weft's own extensions, then the usable ones of other packages."""
    others = (each.extension for each in installed_extensions())
    return (*own_extensions(), *(each for each in others if each is not None))


def load_hook(place: str, kind: type[Hook]) -> Hook:
    """Imports what a hook names, and returns it. Raises INTERNAL if there is nothing of that kind."""
    module, _, name = place.partition(":")
    found = getattr(import_module(module), name, None)
    if not isinstance(found, kind):
        from weft.kernel.errors.error_tree import WeftError  # noqa: PLC0415 - see own_extensions
        from weft.kernel.errors.reasons import Reason  # noqa: PLC0415 - as above

        raise WeftError(Reason.INTERNAL, f"{place} is no {kind.__name__}")
    return found


def disabled_extensions(found: Iterable[Extension], disabled: Iterable[str]) -> Mapping[str, str]:
    """Returns why extensions are off, by name: those that an operator disabled, and those that require one of them."""
    extensions = {each.name: each for each in found}
    off = {name: "extensions.disabled names it" for name in disabled if name in extensions}
    while more := dict(_without_required(extensions, off)):
        off |= more
    return off


def _without_required(extensions: Mapping[str, Extension], off: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, each in extensions.items():
        missing = next((other for other in each.requires if other in off or other not in extensions), None)
        if name not in off and missing is not None:
            yield name, f"it requires {missing}, which is {'off' if missing in extensions else 'not installed'}"


def enabled_extensions(disabled: Iterable[str]) -> tuple[Extension, ...]:
    """Returns the extensions that are not off."""
    found = all_extensions()
    off = disabled_extensions(found, disabled)
    return tuple(each for each in found if each.name not in off)


def listener_hooks(disabled: Iterable[str]) -> Iterator[tuple[ListenerHook, str]]:
    """Yields the listeners of all extensions, each with why it is off; empty: it is on."""
    for each, why in _all_with_reasons(disabled):
        yield from ((hook, f"belongs to {why}" if why else "") for hook in each.listeners)


def kinds_off(disabled: Iterable[str]) -> Mapping[str, str]:
    """Returns why kinds of resources are off, by kind."""
    found = _all_with_reasons(disabled)
    return {kind: f"the kind {kind} belongs to {why}" for each, why in found if why for kind in each.kinds}


def _all_with_reasons(disabled: Iterable[str]) -> Iterator[tuple[Extension, str]]:
    """Yields all extensions, each with itself and why it is off, in words; empty: it is on."""
    found = all_extensions()
    off = disabled_extensions(found, disabled)
    for each in found:
        yield each, f"the extension {each.name}, which is off: {off[each.name]}" if each.name in off else ""


def has_path(paths: Iterable[str], path: str) -> bool:
    """Whether a path is one of an API's `paths`, or below one that ends with `/`; `/` alone stands for itself."""
    return any(path == each or (each != "/" and each.endswith("/") and path.startswith(each)) for each in paths)


def _inspect(point: "EntryPoint", *, is_twice: bool) -> FoundExtension:
    found: Extension | None = None
    fault = f"another extension has the name {point.name}" if is_twice else ""
    if not is_twice:
        try:
            found = load_hook(point.value, Extension)
        except Exception as error:  # noqa: BLE001 - the code of another package
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if found is not None and found.name != point.name:
        fault, found = f"{point.value} calls itself {found.name}; the entry point must have the same name", None
    return FoundExtension(name=point.name, package=_package_of(point), extension=found, fault=fault)


def _package_of(point: "EntryPoint") -> str:
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"
