"""Derives a model's capabilities (tools and thinking) from its chat templates. Pure.

Templates are not executed: an ability is a variable that a template uses outside comments. Engines that render
templates report more exact facts.
"""

import re
from collections.abc import Iterable

from weft.kernel.requests.capabilities import EVERY_MODE, UNKNOWN, Capabilities, ThinkingMode
from weft.kernel.requests.request_values import Skill

_TOOLS = re.compile(r"\btools\b")
_SWITCH = re.compile(r"\benable_thinking\b")
_OTHER_SWITCH = re.compile(r"""\{%-?\s*(?:if|elif|set)\b[^%]*(?<![.\w"'])thinking\b(?!["'])""")
"""The variable `thinking`, which some templates read instead and which weft does not send."""
_THINKS = re.compile(r"<think|\[THINK|<\|channel\|>|\b(?:reasoning_content|reasoning_effort|thinking|thought)\b")


def capabilities_of_templates(templates: Iterable[str]) -> Capabilities:
    """Returns the capabilities that a model's templates show; nothing without templates."""
    texts = [_without_comments(template) for template in templates]
    if not texts:
        return UNKNOWN
    has_tools = any(_TOOLS.search(text) for text in texts)
    tools = frozenset({Skill.TOOLS})
    return Capabilities(
        skills=frozenset({Skill.TEXT}) | (tools if has_tools else frozenset()),
        lacking=frozenset() if has_tools else tools,
        thinking_modes=thinking_modes_of_templates(texts),
    )


def _without_comments(template: str) -> str:
    """Removes `{# comments #}` in a single pass, because templates are untrusted and may be long."""
    kept, place = [], 0
    while (begin := template.find("{#", place)) >= 0 and (end := template.find("#}", begin + 2)) >= 0:
        kept.append(template[place:begin])
        place = end + 2
    return "".join([*kept, template[place:]])


def thinking_modes_of_templates(texts: Iterable[str]) -> frozenset[ThinkingMode]:
    """Returns the thinking modes that requests may set with these templates.

    A template that reads `enable_thinking` supports every mode. One with signs of thinking but no switch always thinks,
    and one without such signs never does.
    """
    texts = list(texts)
    if any(_SWITCH.search(text) for text in texts):
        return EVERY_MODE
    if any(_OTHER_SWITCH.search(text) for text in texts):
        return frozenset({ThinkingMode.DEFAULT})
    if any(_THINKS.search(text) for text in texts):
        return frozenset({ThinkingMode.DEFAULT, ThinkingMode.ENABLED})
    return frozenset({ThinkingMode.DEFAULT, ThinkingMode.DISABLED})
