"""The mesh that a command calls, for programs and pages that speak HTTP: its address, and what it says there."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.client._home import ADDRESS_VARIABLES, URL_VARIABLE, FoundHome, Service, mesh_address, mesh_ca_file, mesh_url
from weft.kernel.address import addresses_of
from weft.kernel.errors import WeftError
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft.kernel.reasons import Reason
from weft_app.cli.mesh_api import MeshApi, connection_to, own_url

CALL_TIMEOUT_SECONDS = 5.0
_REFUSED = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})
_OTHERS = (AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpMesh:
    """The gateway of the mesh that commands of a home call."""

    url: str
    """Without `/v1`."""
    ca_file: Path | None
    """The roots that its certificate is checked with; None: the system's."""
    has_registry: bool
    """Whether the registry that commands of the home call is known to be that of this mesh."""

    def asks_for_keys(self) -> bool:
        """Whether callers need a key. Raises SERVICE_UNAVAILABLE where it does not answer."""
        try:
            self._listed("")
        except WeftError as error:
            if error.reason not in _REFUSED:
                raise
            return True
        return False

    def models(self, key: str) -> list[str]:
        """Returns the names of models and pools that a key may ask for. Raises as `asks_for_keys`."""
        try:
            names = [str(each["id"]) for each in self._listed(key)["data"]]
        except WeftError as error:
            if error.reason not in _REFUSED:
                raise
            raise WeftError(Reason.UNAUTHENTICATED, f"the mesh at {self.url} takes no such key") from error
        except (KeyError, TypeError) as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"{self.url} is no mesh: it lists no models") from error
        return [name for name in names if not name.startswith(_OTHERS)]

    def _listed(self, key: str) -> Any:
        try:
            with MeshApi(connection_to(self.url, self.ca_file, CALL_TIMEOUT_SECONDS), self.url, key) as api:
                return api.get("/v1/models")
        except WeftError as error:
            if error.reason is Reason.SERVICE_UNAVAILABLE:
                error.message += (
                    f"; weft status says whether it runs on this home, and {URL_VARIABLE} names one elsewhere"
                )
            raise


def http_mesh(home: Path) -> HttpMesh:
    """Returns the mesh that commands of a home call, see `mesh_url`.

    Raises SERVICE_UNAVAILABLE, naming what to set, where its HTTP address is not known: a variable with a gRPC address
    of another mesh than the home's names none.
    """
    is_by_variable = bool(os.environ.get(URL_VARIABLE)) and isinstance(home, FoundHome)
    if not is_by_variable and (named := _named_elsewhere(home)):
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"{named[0]} names a mesh elsewhere, whose HTTP address is not known: name that in {URL_VARIABLE}, or the "
            f"mesh of this machine by --home {home}",
        )
    url = mesh_url(home)
    has_registry = not is_by_variable or bool(os.environ.get(ADDRESS_VARIABLES["registry"])) or url == own_url(home)
    return HttpMesh(url=url, ca_file=mesh_ca_file(url, home), has_registry=has_registry)


def _named_elsewhere(home: Path) -> list[str]:
    """Returns the variables with gRPC addresses that are not those of what runs on a home."""
    if not isinstance(home, FoundHome):
        return []
    found = []
    for service, variable in ADDRESS_VARIABLES.items():
        named = os.environ.get(variable, "").strip()
        if named and not set(addresses_of(named)) <= set(addresses_of(_own_address(home, service))):
            found.append(variable)
    return found


def _own_address(home: Path, service: Service) -> str:
    """Returns the address of a service that a home has, whatever variables say; empty: none."""
    try:
        # A plain path is a named home.
        return mesh_address(Path(home), service)
    except WeftError:
        return ""
