"""What a configured model can do beyond text."""

from weft.kernel.request import Skill
from weft_app.config.runner_sections import ModelSection, RunnerSection

PROJECTOR_ARGUMENT = "--mmproj"
"""Gives llama.cpp's server the part of a model that looks at images."""


def skills_of(section: RunnerSection, model: ModelSection) -> frozenset[Skill]:
    """As the section says, else as its engine shows; empty: unknown."""
    if model.skills:
        return frozenset(Skill[word.upper()] for word in model.skills)
    if section.runtime == "llama_server" and any(word.startswith(PROJECTOR_ARGUMENT) for word in model.extra_arguments):
        return frozenset({Skill.TEXT, Skill.IMAGE, Skill.TOOLS})
    return frozenset()
