"""Collaborators of the endpoints of Ollama's API."""

from dataclasses import dataclass
from typing import Annotated

from gateway.deps import GatewayDeps
from gateway.operations import OperationsClient
from gateway.routing import collaborator

SURFACE = "ollama"


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaDeps:
    """Collaborators of the endpoints of Ollama's API."""

    gateway: GatewayDeps
    operations: OperationsClient | None = None
    """Loads and unloads models; None: a request for it is refused."""


Ollama = Annotated[OllamaDeps, collaborator(OllamaDeps)]
