"""Runners as the mesh knows them."""

from collections.abc import Mapping
from typing import Any

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import RunnerView


def runner_view(instances: Mapping[str, InstanceState], name: str = "r1", **fields: Any) -> RunnerView:
    """An active runner with these models; `fields` replace what it has otherwise."""
    known: dict[str, Any] = {
        "incarnation": "run-1",
        "address": f"unix:{name}",
        "host": "titan",
        "runtime": "llama_server",
        "active": True,
        "draining": False,
        "ticket_key": b"",
    }
    return RunnerView(name=name, instances=instances, **known | fields)
