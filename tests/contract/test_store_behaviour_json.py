"""What agents ask for as it is kept: what is written today is read tomorrow, and a damaged row keeps nobody out."""

import json
from pathlib import Path

import pytest
import structlog
from stored_values import BEHAVIOUR, declared_agent

from registry_svc.mesh.rows import DeclaredRecords, behaviour_from_json, behaviour_to_json
from registry_svc.mesh.store import SqlStore
from weft.api.common.v1.agent_behaviour_pb2 import AgentBehaviour, RepetitionPolicy

NO_BEHAVIOUR = AgentBehaviour()

BEHAVIOURS = [
    pytest.param(BEHAVIOUR, id="everything"),
    pytest.param(AgentBehaviour(platform_prompt=True), id="the platform prompt"),
    pytest.param(AgentBehaviour(tools=["b", "a"]), id="tools in their order"),
    pytest.param(AgentBehaviour(max_tool_iterations=64), id="a budget"),
    pytest.param(AgentBehaviour(signals=["A", "B_2"]), id="signals"),
    pytest.param(AgentBehaviour(stop_on_decision_request=False), id="a decision that does not stop it"),
    *(
        pytest.param(AgentBehaviour(repetition_policy=number), id=f"repetition {name}")
        for name, number in RepetitionPolicy.items()[1:]
    ),
    pytest.param(AgentBehaviour(parse_text_tool_calls=False), id="no calls in text"),
    pytest.param(NO_BEHAVIOUR, id="nothing"),
]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_behaviour_comes_back_as_it_was(behaviour: AgentBehaviour) -> None:
    text = behaviour_to_json(behaviour)
    assert (behaviour_from_json(text) or NO_BEHAVIOUR) == behaviour
    assert (text is None) == (behaviour == NO_BEHAVIOUR)


def test_the_written_form_of_a_behaviour_stays() -> None:
    text = behaviour_to_json(BEHAVIOUR)
    assert text is not None
    assert json.loads(text) == {
        "platform_prompt": True,
        "tools": ["files.read", "search"],
        "max_tool_iterations": 0,
        "signals": ["NEEDS_EXTERNAL_INFO", "POLICY_RISK"],
        "stop_on_decision_request": False,
        "repetition": "off",
        "parse_text_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("text", "behaviour"),
    [
        ("{}", NO_BEHAVIOUR),
        ('{"new": [1], "tools": ["a"]}', AgentBehaviour(tools=["a"])),
        ('{"repetition": "whisper", "platform_prompt": true}', AgentBehaviour(platform_prompt=True)),
    ],
)
def test_what_another_release_wrote_is_read(text: str, behaviour: AgentBehaviour) -> None:
    assert (behaviour_from_json(text) or NO_BEHAVIOUR) == behaviour


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"tools": "a"}',
        '{"max_tool_iterations": "x"}',
        '{"max_tool_iterations": 1e400}',
        '{"max_tool_iterations": 2147483648}',
        '{"max_tool_iterations": -1}',
        '{"repetition": []}',
        '{"signals": 1}',
        pytest.param('{"tools":' + "[" * 100_000, id="too deep"),
    ],
)
def test_what_is_no_behaviour_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an agent's behaviour"):
        behaviour_from_json(text)


async def test_a_damaged_behaviour_costs_an_agent_its_tools_and_nobody_the_mesh(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    store = SqlStore(url)
    await store.open()
    await store.save_declarations(DeclaredRecords([], [declared_agent("a1"), declared_agent("a2")]))
    await store.run(lambda tx: tx.execute("UPDATE declared_agents SET behaviour = '{' WHERE name = 'a1'"))
    with structlog.testing.capture_logs() as logs:
        mesh = await store.load()
    await store.close()
    assert [each.manifest.behaviour for each in mesh.agents] == [NO_BEHAVIOUR, BEHAVIOUR]
    assert [entry["agent"] for entry in logs] == ["a1"]


async def test_damaged_default_parameters_cost_an_agent_its_defaults_and_nobody_the_mesh(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/registry.db"
    store = SqlStore(url)
    await store.open()
    await store.save_declarations(
        DeclaredRecords([], [declared_agent("a1"), declared_agent("a2"), declared_agent("a3")])
    )
    damaged = "UPDATE declared_agents SET default_params = :text WHERE name = :name"
    await store.run(lambda tx: tx.many(damaged, [{"name": "a1", "text": "{"}, {"name": "a2", "text": "[1]"}]))
    with structlog.testing.capture_logs() as logs:
        mesh = await store.load()
    await store.close()
    assert [each.manifest.HasField("default_params") for each in mesh.agents] == [False, False, True]
    assert [entry["agent"] for entry in logs] == ["a1", "a2"]
