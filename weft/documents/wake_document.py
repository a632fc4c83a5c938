"""Who wakes a sleeping model, as a document. The ranges are those of registry/v1/wake.proto."""

import re
from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from weft.documents.document_base import DocumentPart
from weft.wake.recipes import DEFAULT_BROADCAST_ADDRESS, DEFAULT_MAX_WAIT_SECONDS, DEFAULT_WAKE_PORT, MAX_WAIT_SECONDS

MAX_URL_CHARS = 2048
MAX_HEADERS = 32
MAX_HEADER_NAME_CHARS = 128
MAX_HEADER_VALUE_CHARS = 4096
MAX_ARGUMENTS = 64
MAX_ARGUMENT_CHARS = 4096
MAX_PORT = 65_535

_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}")


def _mac_address(text: str) -> str:
    if _MAC_ADDRESS.fullmatch(text) is None:
        raise ValueError("must be six pairs of hex digits joined by ':' or '-'")
    return text


def _ipv4_address(text: str) -> str:
    IPv4Address(text)
    return text


class HttpRecipeDocument(DocumentPart):
    """An HTTP request to a controller that starts the backend; every 2xx is success."""

    type: Literal["http"]
    """An HTTP request."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$", max_length=MAX_URL_CHARS, repr=False)]
    """Where to; http or https."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """The request's method."""
    headers: dict[
        Annotated[str, Field(min_length=1, max_length=MAX_HEADER_NAME_CHARS)],
        Annotated[str, Field(max_length=MAX_HEADER_VALUE_CHARS)],
    ] = Field(default={}, max_length=MAX_HEADERS, repr=False)
    """Headers. In a value, `${WEFT_WAKE_...}` stands for that environment variable of the router."""


class CommandRecipeDocument(DocumentPart):
    """A program, started directly and never through a shell; exit code 0 is success."""

    type: Literal["command"]
    """A program."""
    argv: tuple[Annotated[str, Field(max_length=MAX_ARGUMENT_CHARS)], ...] = Field(
        min_length=1, max_length=MAX_ARGUMENTS, strict=False, repr=False
    )
    """The program and its arguments."""


class WakeOnLanRecipeDocument(DocumentPart):
    """A magic packet to a sleeping network card."""

    type: Literal["wake_on_lan"]
    """A magic packet."""
    mac_address: Annotated[str, AfterValidator(_mac_address)]
    """Hardware address, six pairs of hex digits joined by ':' or '-'."""
    broadcast_address: Annotated[str, AfterValidator(_ipv4_address)] = DEFAULT_BROADCAST_ADDRESS
    """IPv4 address to send to."""
    port: Annotated[int, Field(ge=1, le=MAX_PORT)] = DEFAULT_WAKE_PORT
    """UDP port."""


RecipeDocument = HttpRecipeDocument | CommandRecipeDocument | WakeOnLanRecipeDocument


class WakeDocument(DocumentPart):
    """Who can wake a sleeping model. At least one of `byRunner` and `byMesh` is given."""

    by_runner: bool = False
    """Its runner wakes it when asked."""
    by_mesh: Annotated[RecipeDocument, Field(discriminator="type")] | None = None
    """What a router does to wake the host the runner lives on: a sleeping host cannot wake itself."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=MAX_WAIT_SECONDS)] = DEFAULT_MAX_WAIT_SECONDS
    """Longest wait from the first step until the model takes requests."""

    @model_validator(mode="after")
    def _somebody_wakes_it(self) -> "WakeDocument":
        if not self.by_runner and self.by_mesh is None:
            raise ValueError("needs byRunner: true, or a recipe in byMesh")
        return self
