"""What a model takes by its chat templates: tools and thinking. Pure.

A template is not run here: an ability is a variable that it names outside of comments. Engines that render templates
themselves report more exact facts.
"""

import re
from collections.abc import Iterable

from weft.kernel.abilities import EVERY_MODE, UNKNOWN, Abilities, ThinkingMode
from weft.kernel.request import Skill

_TOOLS = re.compile(r"\btools\b")
_SWITCH = re.compile(r"\benable_thinking\b")
_OTHER_SWITCH = re.compile(r"""\{%-?\s*(?:if|elif|set)\b[^%]*(?<![.\w"'])thinking\b(?!["'])""")
"""The variable `thinking`, which some templates read instead, and which is not sent."""
_THINKS = re.compile(r"<think|\[THINK|<\|channel\|>|\b(?:reasoning_content|reasoning_effort|thinking|thought)\b")


def abilities_of_templates(templates: Iterable[str]) -> Abilities:
    """Returns what the templates of a model show; nothing where there is no template."""
    texts = [_without_comments(template) for template in templates]
    if not texts:
        return UNKNOWN
    has_tools = any(_TOOLS.search(text) for text in texts)
    tools = frozenset({Skill.TOOLS})
    return Abilities(
        skills=frozenset({Skill.TEXT}) | (tools if has_tools else frozenset()),
        lacking=frozenset() if has_tools else tools,
        thinking_modes=thinking_modes_of_templates(texts),
    )


def _without_comments(template: str) -> str:
    """Returns a template without `{# comments #}`, in one pass: templates are untrusted, and may be long."""
    kept, place = [], 0
    while (begin := template.find("{#", place)) >= 0 and (end := template.find("#}", begin + 2)) >= 0:
        kept.append(template[place:begin])
        place = end + 2
    return "".join([*kept, template[place:]])


def thinking_modes_of_templates(texts: Iterable[str]) -> frozenset[ThinkingMode]:
    """Returns how requests may set the thinking of a model with these templates.

    One that reads `enable_thinking` takes every mode. One with signs of thinking and no switch always thinks, and one
    without such signs never does.
    """
    texts = list(texts)
    if any(_SWITCH.search(text) for text in texts):
        return EVERY_MODE
    if any(_OTHER_SWITCH.search(text) for text in texts):
        return frozenset({ThinkingMode.DEFAULT})
    if any(_THINKS.search(text) for text in texts):
        return frozenset({ThinkingMode.DEFAULT, ThinkingMode.ENABLED})
    return frozenset({ThinkingMode.DEFAULT, ThinkingMode.DISABLED})
