"""The presets of server programs: every fact has a source, every command line can be filled, every name is in docs."""

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml
from reference_pages.presets import page

from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.placeholders import placeholders_of
from runner_svc.runtimes.server.presets import OTHER_PROGRAM, PRESETS, PresetName, ServerPreset
from runner_svc.runtimes.server.runtime import ServerModel, check_template
from weft.kernel.requests.request_values import Operation
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

ENGINES_PAGE = (Path(__file__).resolve().parents[3] / "docs/engines.md").read_text(encoding="utf-8")
NO_FACTS = {"title", "version", "install", "sources"}
ALWAYS_STATED = {"command", "key_variable", "health_path", "lists_model", "operations", "usage_in_streams"}
ALWAYS_STATED |= {"cancellation", "parameters"}


def _stated(preset: ServerPreset) -> set[str]:
    """Returns the facts of a preset: those that each must state, and those that are not as of an unknown program."""
    return ALWAYS_STATED | {
        field.name
        for field in fields(preset)
        if field.name not in NO_FACTS
        and getattr(preset, field.name) != getattr(OTHER_PROGRAM, field.name)
        # What differs only because other programs may do more.
        and not (field.name == "other_operations" and not preset.other_operations)
    }


def test_settings_and_table_list_the_same_presets() -> None:
    assert set(get_args(PresetName)) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_every_fact_has_a_source_and_every_source_a_fact(name: PresetName) -> None:
    preset = PRESETS[name]
    assert set(preset.sources) >= _stated(preset) - {"environment"} | ({"environment"} if preset.environment else set())
    assert set(preset.sources) <= {field.name for field in fields(preset)} - NO_FACTS
    assert all(preset.sources.values())
    assert preset.version
    assert preset.install


@pytest.mark.parametrize("name", PRESETS)
def test_command_line_has_port_and_model_and_no_key(name: PresetName) -> None:
    preset = PRESETS[name]
    routes = [route.body for route in (preset.load, preset.sleep, preset.wake, preset.flush) if route is not None]
    texts = (*preset.command, *preset.environment.values(), *routes)
    for text in texts:
        check_template(text)
    used = placeholders_of(texts)
    assert "port" in used
    assert used & {"model", "name"}
    assert not any("key" in word for word in preset.command)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_offers_the_operations_it_can_name(name: PresetName) -> None:
    preset = PRESETS[name]
    assert preset.operations >= {Operation.CHAT, Operation.COMPLETION}
    assert not preset.operations & preset.other_operations
    assert (preset.sleep is not None) or preset.wake is None
    assert bool(preset.metrics.all) == bool(preset.metrics_path)
    profile = ParameterProfile(engine=preset.parameters)
    assert not profile.engine.untaken & profile.engine.renamed.keys()
    assert profile.engine.engine == preset.title


def test_reference_compares_every_preset() -> None:
    head, _, rows = page().partition("---")
    assert all(f"`{name}`" in head for name in PRESETS)
    assert "`cache_salt`" in rows


def test_documented_examples_are_valid_and_cover_every_preset() -> None:
    section = ENGINES_PAGE.partition("### Server programs")[2].partition("\n### Servers that")[0]
    shown = set()
    for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        for runner in yaml.safe_load(block)["runners"]:
            parsed = parse_section(ConfiguredRunner, runner)
            for model in parsed.models:
                assert isinstance(model, ServerModel)
                shown.add(model.preset)
                if model.working_folder is None:
                    served_model(parsed, model, 5.0)
    assert shown == {None, *PRESETS}
