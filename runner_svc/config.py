"""How a runner is set up. The host builds these from the configuration file; tests build them by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.backends.port import Backend
from runner_svc.policy.restart import RestartLimits
from weft.kernel.request import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model and how its backend is made."""

    name: str
    """Unique in the mesh."""
    pool: str = ""
    """Models of one pool answer for each other; empty: a pool of its own."""
    make_backend: Callable[[], Backend]
    operations: frozenset[Operation] = frozenset(Operation)
    slots: int = 4
    context_tokens: int = 0
    model_path: Path | None = None
    """The file whose digest goes on receipts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """One runner process."""

    name: str
    """Unique in the mesh."""
    runtime: str = "llama_server"
    host: str
    address: str
    """Where others reach it, as a gRPC target such as "unix:/path/runner.sock"."""
    registry_address: str
    session_file: Path
    """Keeps the session id across restarts."""
    models: tuple[ServedModel, ...]
    restart: RestartLimits = field(default_factory=RestartLimits)
