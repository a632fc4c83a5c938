"""Agents: named personas over a model or a pool. Runners can publish them too."""

from weft.api.common.v1.agent_behaviour_pb2 import AgentBehaviour
from weft.api.registry.v1.agent_pb2 import Agent, AgentManifest
from weft.dispatch.declared_presets import check_preset
from weft.documents.conditions import agent_conditions
from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField, check_named
from weft.documents.resource_kinds import ResourceKind
from weft.documents.selectors import to_canonical_tags
from weft.kernel.values.names import AGENT_PREFIX


def check_agent(manifest: AgentManifest, field: str) -> None:
    """Checks an agent; see `DeclaredKind.check`."""
    check_named(manifest, field)
    check_preset(manifest, f"{field}.")
    _drop_defaults(manifest.behaviour)
    if not manifest.behaviour.ByteSize():
        manifest.ClearField("behaviour")
    to_canonical_tags(manifest, field)


def _drop_defaults(behaviour: AgentBehaviour) -> None:
    """Clears fields that have their default: absent means the same."""
    if behaviour.stop_on_decision_request:
        behaviour.ClearField("stop_on_decision_request")
    if behaviour.parse_text_tool_calls:
        behaviour.ClearField("parse_text_tool_calls")


KIND = DeclaredKind(
    kind=ResourceKind.AGENT,
    declared=AgentManifest,
    record=Agent,
    summary="A named persona on top of a model or a pool.",
    conditions=agent_conditions,
    check=check_agent,
    references=(
        ReferenceField(name="model", to=PointsTo.MODEL, key="model", words="target"),
        ReferenceField(name="pool", to=PointsTo.POOL, key="pool", words="target"),
    ),
    prefix=AGENT_PREFIX,
    initial={"kind": Agent.KIND_PUBLIC},
)
