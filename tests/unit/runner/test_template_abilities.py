"""What a model takes by its chat templates."""

import time

import pytest

from runner_svc.policy.template_abilities import abilities_of_templates
from weft.kernel.abilities import EVERY_MODE, UNKNOWN, ThinkingMode
from weft.kernel.request import Skill

DEFAULT, ENABLED, DISABLED = ThinkingMode.DEFAULT, ThinkingMode.ENABLED, ThinkingMode.DISABLED
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
MAX_SECONDS = 5.0


@pytest.mark.parametrize(
    ("template", "modes"),
    [
        (PLAIN, {DEFAULT, DISABLED}),
        (
            PLAIN + "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}",
            EVERY_MODE,
        ),
        (PLAIN + "{% if not thinking is defined %}{% set thinking = false %}{% endif %}<think>", {DEFAULT}),
        (PLAIN + "{{ '<think>\\n' }}", {DEFAULT, ENABLED}),
        (PLAIN + "{% if message.thinking %}<|channel|>analysis{% endif %}{{ reasoning_effort }}", {DEFAULT, ENABLED}),
        (PLAIN + "{# enable_thinking: <think> #}", {DEFAULT, DISABLED}),
        (PLAIN + "{{ rethinking_tools }}", {DEFAULT, DISABLED}),
    ],
)
def test_thinking_is_configurable_if_the_template_reads_the_switch(template: str, modes: set[ThinkingMode]) -> None:
    assert abilities_of_templates([template]).thinking_modes == modes


@pytest.mark.parametrize(
    ("templates", "has"),
    [
        ([PLAIN], False),
        ([PLAIN + "{% if tools %}{{ tools }}{% endif %}"], True),
        ([PLAIN + "{# tools #}"], False),
        ([PLAIN, PLAIN + "{{ tools }}"], True),
        ([PLAIN + "{{ my_tools }}"], False),
    ],
)
def test_tools_are_supported_if_the_template_reads_them(templates: list[str], has: bool) -> None:
    found = abilities_of_templates(templates)
    assert (Skill.TOOLS in found.skills, Skill.TOOLS in found.lacking) == (has, not has)


def test_abilities_are_unknown_without_a_template() -> None:
    assert abilities_of_templates([]) == UNKNOWN


@pytest.mark.parametrize("unit", ["{#", "{% if ", "{% if thinking", "{%- set x", "tools ", "<"])
def test_malicious_template_of_maximum_length_is_read_in_time(unit: str) -> None:
    began = time.process_time()
    abilities_of_templates([unit * (2**20 // len(unit))])
    assert time.process_time() - began < MAX_SECONDS
