"""What an agent of the configuration file asks for, as its runner publishes it."""

import re
from pathlib import Path
from typing import Any

import pytest

from runner_svc.policy.signals import signal_catalogue
from runner_svc.runner_settings import RunnerSettings
from runner_svc.session.report import RunnerReport
from weft.api.common.v1 import agent_behaviour_pb2, warning_pb2
from weft.api.registry.v1 import agent_pb2
from weft.documents.yaml_documents import read_documents
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.home import WeftHome
from weft_app.compose.published_agents import published_agents
from weft_app.compose.runner import runner_config
from weft_app.compose.served_models import chat_settings
from weft_app.config.loader import load_config, parse_section
from weft_app.config.runners import ConfiguredRunner

EVERYTHING: dict[str, Any] = {
    "platform_prompt": True,
    "tools": ["files.read", "search"],
    "max_tool_iterations": 0,
    "signals": ["NEEDS_EXTERNAL_INFO", "MY_OWN_2"],
    "stop_on_decision_request": False,
    "repetition": "kill",
    "parse_text_tool_calls": False,
}


def section(**agent: Any) -> RunnerSettings:
    model = {"name": "m1", "url": "http://box.lan/v1"}
    agents = [{"name": "plain", "model": "m1"}, {"name": "coder", "model": "m1", **agent}]
    return parse_section(
        ConfiguredRunner, {"name": "r1", "runtime": "openai_http", "models": [model], "agents": agents}
    )


def only_runner(path: Path) -> RunnerSettings:
    runners = load_config(path).runners
    assert runners is not None
    return runners[0]


def published(tmp_path: Path, **agent: Any) -> agent_pb2.AgentManifest:
    config = runner_config(section(**agent), WeftHome(tmp_path), address="unix:/r", registry_address="unix:/g")
    plain, coder = RunnerReport(config, "life-1", []).agents()
    assert not plain.HasField("behaviour")
    return coder


def test_every_behavior_setting_of_an_agent_is_published(tmp_path: Path) -> None:
    assert published(tmp_path, **EVERYTHING).behaviour == agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=True,
        tools=["files.read", "search"],
        max_tool_iterations=0,
        signals=["NEEDS_EXTERNAL_INFO", "MY_OWN_2"],
        stop_on_decision_request=False,
        repetition_policy=agent_behaviour_pb2.REPETITION_POLICY_KILL,
        parse_text_tool_calls=False,
    )
    assert {
        field.name.removesuffix("_policy") for field in agent_behaviour_pb2.AgentBehaviour.DESCRIPTOR.fields
    } == set(EVERYTHING)


def test_default_behavior_is_not_published(tmp_path: Path) -> None:
    asking = {"platform_prompt": False, "stop_on_decision_request": True, "parse_text_tool_calls": True, "tools": []}
    assert not published(tmp_path, **asking).HasField("behaviour")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"signals": ["GOOD", "not good"]}, "signals[1]"),
        ({"signals": ["A", "A"]}, "signals[1]"),
        ({"tools": ["search", "search"]}, "tools[1]"),
    ],
)
def test_invalid_behavior_is_reported_at_runner_setup(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        published_agents(section(**fields))
    assert refused.value.field == f"runners.r1.agents[1].{field}"


@pytest.mark.parametrize(("written", "meant"), [("off", "off"), ("'off'", "off"), ("warn", "warn"), ("kill", "kill")])
def test_off_is_a_word_even_if_yaml_parses_it_as_false(written: str, meant: str, tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text(f"""
runners:
  - name: r1
    runtime: openai_http
    models: [{{name: m1, url: "http://box.lan/v1", repetition: {written}}}]
    agents: [{{name: coder, model: m1, repetition: {written}}}]
""")
    runner = only_runner(path)
    assert (runner.models[0].repetition, runner.agents[0].repetition) == (meant, meant)
    path.write_text(path.read_text().replace(written, "on"))
    with pytest.raises(FieldError):
        load_config(path)


def test_both_documented_examples_are_valid_and_equivalent(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text("utf-8")
    file, document, *_ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "weft.yaml").write_text(file)
    runner = only_runner(tmp_path / "weft.yaml")
    config = runner_config(runner, WeftHome(tmp_path), address="unix:/r", registry_address="unix:/g")
    (read,) = read_documents(document, "agents.md")
    (published,) = RunnerReport(config, "life-1", []).agents()
    assert read.document.declared == published


def test_documented_platform_prompt_example_has_the_described_effect(
    tmp_path: Path,
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text("utf-8")
    (tmp_path / "weft.yaml").write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[2])
    runner = only_runner(tmp_path / "weft.yaml")
    chats = {model.name: chat_settings(runner, model) for model in runner.models}
    assert {name: chat.platform_prompt for name, chat in chats.items()} == {"qwen3": True, "coder": False, "lab": True}
    assert "Ghent" in chats["qwen3"].platform_context
    assert "laboratory" in chats["lab"].platform_context


def test_page_lists_every_behavior_setting_and_warning() -> None:
    docs = Path(__file__).parents[3] / "docs"
    rows = re.findall(r"^\| `(\w+)` \|", (docs / "agents.md").read_text("utf-8"), re.MULTILINE)
    assert set(EVERYTHING) <= set(rows)
    codes = {name.removeprefix("WARNING_CODE_").lower() for name in warning_pb2.WarningCode.keys()[1:]}
    assert codes <= set(re.findall(r"^\| `(\w+)` \|", (docs / "api.md").read_text("utf-8"), re.MULTILINE))
    assert set(signal_catalogue()) <= set(rows)
