"""A preset's claims about a server program, compared with the program's behavior."""

from collections.abc import Mapping
from typing import Any

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.metrics_page import MetricNames
from runner_svc.runtimes.server.presets import ServerPreset
from weft.api.runner.v1 import runner_service_pb2 as pb

MAX_SEEN_CHARS = 500


def claims_of(preset: ServerPreset, seen: Mapping[str, str | None]) -> list[pb.EngineClaim]:
    """Returns the claims of a preset. `seen`: what contradicts each fact, by name; None: it holds."""
    return [
        pb.EngineClaim(
            name=name,
            claim=_words(getattr(preset, name)),
            source=source,
            state=_state(seen, name),
            seen=(seen.get(name) or "")[:MAX_SEEN_CHARS],
        )
        for name, source in preset.sources.items()
    ]


def missing_metrics(preset: ServerPreset, page: bytes) -> list[str]:
    """Returns the names of metrics that a page in Prometheus' text format lacks."""
    lines = page.decode("utf-8", "replace").splitlines()
    found = {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}
    # A metric without a value has only a TYPE line.
    found |= {line.split()[2] for line in lines if line.startswith("# TYPE ") and len(line.split()) > 2}
    return [name for name in preset.metrics.all if name not in found]


def _state(seen: Mapping[str, str | None], name: str) -> pb.ClaimState.ValueType:
    if name not in seen:
        return pb.CLAIM_STATE_UNSPECIFIED
    return pb.CLAIM_STATE_KEPT if seen[name] is None else pb.CLAIM_STATE_BROKEN


def _words(value: Any) -> str:
    match value:
        case bool():
            words = "yes" if value else "no"
        case EngineParameters():
            words = ", ".join(sorted(value.allowed))
        case MetricNames():
            words = ", ".join(value.all)
        case frozenset():
            words = ", ".join(sorted(operation.name.lower() for operation in value))
        case Mapping():
            words = ", ".join(value.values())
        case tuple():
            words = " ".join(value)
        case _:
            words = "" if value is None else str(value)
    return words or "none"
