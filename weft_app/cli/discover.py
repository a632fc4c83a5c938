"""`weft models discover`, and what `weft up` asks about what it has found on this machine."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.network_options import Discover
from weft_app.cli.options import DEFAULT_HOME, HomeOption, MeshConfigOption, OutputFormat, OutputOption
from weft_app.cli.output import TextTable, custom_columns, document_text
from weft_app.cli.terminal import is_err_terminal, note, safe_text, say

if TYPE_CHECKING:
    from runner_svc.discovery import FoundServer
    from weft_app.compose.discovery import Discovered
    from weft_app.compose.home import WeftHome
    from weft_app.compose.mdns_announcement import Announcement
    from weft_app.config.config import DiscoverySettings, WeftConfig

LISTEN_SECONDS = 1.0
"""Time for announced meshes to answer, which takes them some 0.1 s. A lost query is not repeated: `weft runner join`
listens longer."""
SHOWN_MODELS = 6
"""Maximum number of models in a server's line."""
SHOWN_FILES = 8
"""Maximum number of files in the question of `weft up`."""


def discover(
    addresses: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST:PORT]...", help="Addresses to probe instead of the usual ports.", show_default=False
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show engines and models of other programs on this machine, a weft.yaml for them, and announced meshes.

    Meshes are those that `weft up --announce` announces on this network.

    Example: weft models discover box.lan:8000 box.lan:11434
    """
    with ThreadPoolExecutor(1, thread_name_prefix="announcements") as pool:
        announced = None if addresses else pool.submit(_found_meshes)
        found, settings = _found_here(addresses, config, home)
        if output is OutputFormat.TABLE:
            say("".join(f"{line}\n" for line in _page(found, settings)))
        meshes = () if announced is None else announced.result()
    if output is not OutputFormat.TABLE:
        say(document_text({**_document(found), "meshes": [asdict(mesh) for mesh in meshes]}, output))
    elif meshes:
        say("".join(f"{line}\n" for line in ("", *TextTable(_MESHES).text(meshes).splitlines(), "", _JOIN_LINE)))


def _found_here(addresses: list[str] | None, config: Path | None, home: Path) -> "tuple[Discovered, DiscoverySettings]":
    """Returns engines and models of this machine, and the settings that they were found with."""
    # Imported here: announcements can arrive in the meantime.
    from weft_app.compose.discovery import discover as look  # noqa: PLC0415
    from weft_app.compose.home import WeftHome  # noqa: PLC0415
    from weft_app.config.config import DiscoverySettings  # noqa: PLC0415
    from weft_app.config.loader import load_files, parse_section  # noqa: PLC0415

    folder = WeftHome(home.expanduser().absolute())
    loaded = load_files(folder.config_files(config))
    settings = loaded.discovery
    if addresses:
        settings = parse_section(DiscoverySettings, {"addresses": addresses, "max_files": settings.max_files})
    return asyncio.run(look(settings, folder, accelerators=loaded.accelerators)), settings


def _found_meshes() -> "Sequence[Announcement]":
    from weft_app.compose.mdns_announcement import find_meshes  # noqa: PLC0415 - `up` imports this

    try:
        return asyncio.run(find_meshes(LISTEN_SECONDS))
    except WeftError as error:
        note(f"could not look for announced meshes: {error.message}")
        return ()


def _page(found: "Discovered", settings: "DiscoverySettings") -> Iterator[str]:
    if found.servers:
        yield from TextTable(_SERVERS).text(found.servers).splitlines()
    if found.files:
        yield from ("", *TextTable(_FILES).text(found.files).splitlines())
    if found.left_out:
        yield f"\n{found.left_out} more model files are not served; weft models ls --found lists them"
    if found.is_something:
        yield "\nweft up --discover=yes serves them; in weft.yaml that is:\n"
        import yaml  # noqa: PLC0415 - `up` imports this

        yield yaml.safe_dump({"runners": found.runners()}, sort_keys=False).rstrip()
    elif not found.servers:
        from weft_app.compose.discovery import probed_addresses  # noqa: PLC0415 - `up` imports this

        files = "no program has model files" + " that can be served" * bool(found.left_out)
        if not settings.max_files:
            files = "model files were not looked for (discovery.max_files is 0)"
        yield f"nothing found: no engine answers at {', '.join(probed_addresses(settings))}, and {files}"
        yield "weft run hf:OWNER/REPO pulls and serves a model of the Hugging Face hub"


_SERVERS = custom_columns(
    "ENGINE:title ADDRESS:url MODELS", MODELS=lambda server: server.why_empty or _models(server) or "none yet"
)
_FILES = custom_columns(
    "SERVED_AS:name SOURCE:model.source SIZE:model.size_bytes:size CONTEXT:size.context_tokens SLOTS:size.slots"
)

_MESHES = custom_columns(
    "MESH:name RUNNERS_JOIN_AT:shown_addresses VERSION:version FINGERPRINT",
    FINGERPRINT=lambda mesh: mesh.fingerprint or "(certificate of a public authority)",
)
_JOIN_LINE = "join one with weft runner join. An announcement can be forged: compare the fingerprint"


def _models(server: "FoundServer") -> str:
    from runner_svc.discovery import shown_models  # noqa: PLC0415 - it needs an HTTP client, and `up` imports this

    return shown_models(server.models, SHOWN_MODELS)


def _document(found: "Discovered") -> dict[str, Any]:
    from weft.documents.codec import document_of  # noqa: PLC0415 - it needs protobuf

    servers = [
        {
            **{name: getattr(server, name) for name in ("program", "version", "url")},
            "models": list(server.models),
            "detail": server.why_empty,
        }
        for server in found.servers
    ]
    files = [{"name": file.name, **document_of(file.model)} for file in found.files]
    return {
        "kind": "Discovery",
        "servers": servers,
        "files": files,
        "filesLeftOut": found.left_out,
        "runners": found.runners(),
    }


def offered_models(
    config: "WeftConfig", home: "WeftHome", wanted: Discover | None, *, no_demo: bool
) -> "Discovered | None":
    """Returns the engines and models that `weft up` should serve; None: none, or the configuration has runners.

    Asks on a terminal. Elsewhere only lists them, unless the command line or the settings say yes.
    """
    mode = wanted or Discover(config.discovery.mode)
    if config.runners is not None or mode is Discover.NO:
        return None
    from weft_app.compose.discovery import discover as look  # noqa: PLC0415 - most starts have runners

    found = asyncio.run(look(config.discovery, home, accelerators=config.accelerators))
    if not found.is_something:
        return None
    lines = list(_found_lines(found))
    if mode is Discover.YES:
        for line in ("found on this machine, and served:", *lines):
            note(line)
        return found
    if not (sys.stdin.isatty() and is_err_terminal()):
        note(f"found on this machine, and not served: {'; '.join(line.strip() for line in lines)}")
        note("weft up --discover=yes serves it")
        return None
    for line in ("found on this machine:", *lines):
        note(line)
    demo = "no model" if no_demo else "the demo model"
    if typer.confirm(
        f"weft: serve this? (no: {demo}; to skip this question: --discover=yes or no)", default=True, err=True
    ):
        return found
    return None


def shown_server(server: "FoundServer") -> str:
    """Returns one line with a server and its models."""
    models = server.why_empty or _models(server) or "no models yet"
    return safe_text(f"{server.title} at {server.url}: {models}")


def _found_lines(found: "Discovered") -> Iterator[str]:
    for server in found.servers:
        yield f"  {shown_server(server)}"
    if count := len(found.files):
        names = ", ".join(file.name for file in found.files[:SHOWN_FILES])
        more = f" and {count - SHOWN_FILES} more" if count > SHOWN_FILES else ""
        yield safe_text(f"  {count} model file{'' if count == 1 else 's'} of other programs: {names}{more}")
