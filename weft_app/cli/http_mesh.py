"""The mesh that a command calls, for programs and pages that speak HTTP: its address, and what it says there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.client._home import URL_VARIABLE, mesh_ca_file
from weft.kernel.errors import WeftError
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft.kernel.reasons import Reason
from weft_app.cli.mesh_api import MeshApi, connection_to, gateway_url, own_url

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
    is_own: bool
    """Whether it is the mesh of the home."""

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
    """Returns the mesh that commands of a home call. Raises as `gateway_url`."""
    url = gateway_url(home)
    return HttpMesh(url=url, ca_file=mesh_ca_file(url, home), is_own=url == own_url(home))
