"""`weft mesh version`: the versions of this client, of the mesh that runs, and of what they are made with."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weft import __version__
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft_app.cli.mesh_api import connect, gateway_url, own_url
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, PageOutputOption
from weft_app.cli.output import custom_columns, page, print_page
from weft_app.compose.home import WeftHome

API_VERSION = "v1"
"""Version of the gRPC packages, such as weft.api.router.v1."""
UNKNOWN = "unknown"
_LIBRARIES = {"grpc": "grpcio", "protobuf": "protobuf"}
"""Distributions of the libraries with a shown version."""
_FACTS = custom_columns(
    "Client:client Mesh Runners API:api Python:python gRPC:grpc protobuf:protobuf",
    Mesh=lambda facts: facts.get("mesh") or f"none ({facts['problem']})",
    Runners=lambda facts: ", ".join(f"{name} {text}" for name, text in facts.get("runners", {}).items()) or None,
)


def show_version(output: PageOutputOption = OutputFormat.TABLE, home: HomeOption = DEFAULT_HOME) -> None:
    """Show the versions of the client, of the running mesh and its runners, of the API, Python and gRPC.

    Without a mesh, the rest is shown with the reason.

    Example: weft mesh version -o json
    """
    facts: dict[str, Any] = {
        "client": __version__,
        **_mesh(home),
        "api": API_VERSION,
        "python": platform.python_version(),
        **{name: _version_of(distribution) for name, distribution in _LIBRARIES.items()},
    }
    print_page(output, lambda: "".join(f"{line}\n" for line in page(_FACTS, facts)), lambda: facts)


def _mesh(home: Path) -> dict[str, Any]:
    """Returns the versions of the home's mesh and its runners, or the problem."""
    try:
        url = gateway_url(home)
        with connect(home) as documents:
            runners = documents.documents(ResourceKind.RUNNER)
    except WeftError as error:
        return {"problem": error.message}
    running = WeftHome(home.expanduser().absolute()).running() or {}
    # A mesh elsewhere does not report its version, but its runners do.
    mesh = running.get("version", UNKNOWN) if url == own_url(home) else UNKNOWN
    return {"mesh": mesh, "runners": {runner["name"]: runner["status"].get("version", "") for runner in runners}}


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return UNKNOWN
