"""The mesh that a command calls, for programs and pages that speak HTTP: its address, and what it says there."""

import json
import os
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from weft.client._home import ADDRESS_VARIABLES, URL_VARIABLE, FoundHome, Service, mesh_address, mesh_ca_file, mesh_url
from weft.kernel.address import addresses_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft.kernel.reasons import Reason

CALL_TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MODELS = "/v1/models"
_REFUSED = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
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
        return self._read(_MODELS, "")[0] in _REFUSED

    def models(self, key: str) -> list[str]:
        """Returns the names of models and pools that a key may ask for. Raises as `asks_for_keys`."""
        status, text = self._read(_MODELS, key)
        if status in _REFUSED:
            raise WeftError(Reason.UNAUTHENTICATED, f"the mesh at {self.url} takes no such key")
        try:
            names = [str(each["id"]) for each in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._failure(f"its list of models is none (status {status})") from error
        return [name for name in names if not name.startswith(_OTHERS)]

    def _read(self, path: str, key: str) -> tuple[int, bytes]:
        """Returns status and body of a GET."""
        # The address is of HTTP or HTTPS: `mesh_url` checks that of the variable, and services write theirs.
        request = Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310
        try:
            with self._opener().open(request, timeout=CALL_TIMEOUT_SECONDS) as answer:
                return answer.status, answer.read(MAX_ANSWER_BYTES)
        except HTTPError as error:
            with error:
                return error.code, b""
        except (OSError, HTTPException) as error:  # URLError is an OSError, too
            why = getattr(error, "reason", error)
            is_untrusted = isinstance(why, ssl.SSLCertVerificationError)
            remedy = " (WEFT_CA_FILE names the roots of its certificate)" if is_untrusted else ""
            raise self._failure(f"{why}{remedy}") from error

    def _opener(self) -> Any:
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # ssl.SSLError is one, too
            raise invalid_field("WEFT_CA_FILE", f"{self.ca_file} cannot be read as PEM certificates") from error
        return build_opener(ProxyHandler({}), HTTPSHandler(context=context))

    def _failure(self, why: str) -> WeftError:
        return WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"the mesh at {self.url} does not answer: {why}; weft status says whether it runs on this home, and "
            f"{URL_VARIABLE} names one elsewhere",
        )


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
    has_registry = not is_by_variable or bool(os.environ.get(ADDRESS_VARIABLES["registry"])) or url == _own_url(home)
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


def _own_url(home: Path) -> str:
    try:
        return mesh_url(Path(home))
    except WeftError:
        return ""
