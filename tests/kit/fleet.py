"""Views of a mesh: what a test does not set is that of an active local model, or of a runner that nobody can reach."""

from typing import Any

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import ModelView, RunnerView
from weft.kernel.requests.request_values import Operation


def runner_view(name: str = "titan", **fields: Any) -> RunnerView:
    known = {
        "incarnation": "1",
        "address": f"unix:/nowhere/{name}",
        "host": "here",
        "runtime": "fake",
        "active": True,
        "draining": False,
        "ticket_key": b"k" * 32,
        "instances": {},
    }
    return RunnerView(**{"name": name, **known, **fields})


def model_view(name: str = "qwen", runner: str = "titan", **fields: Any) -> ModelView:
    known = {
        "pool": name,
        "operations": frozenset({Operation.CHAT}),
        "remote": False,
        "active": True,
        "context_tokens": 0,
        "created_at_seconds": 0,
    }
    return ModelView(**{"name": name, "runner": runner, **known, **fields})


def ready(model: str = "qwen", slots: int = 1, **fields: Any) -> InstanceState:
    """Returns the state of a loaded model."""
    return InstanceState(**{"model": model, "phase": InstanceState.PHASE_READY, "slots_total": slots, **fields})
