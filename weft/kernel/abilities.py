"""What a model takes beyond plain text, as far as it is known: skills, thinking modes, languages."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.kernel.request import Skill


class ThinkingMode(IntEnum):
    """How a request sets a model's thinking; numbers as in `registry.v1.ThinkingMode`."""

    DEFAULT = 1
    ENABLED = 2
    DISABLED = 3


MAX_SHOWN_CODE_CHARS = 64
"""Characters of a language's code in an error."""
ANY_SKILL = frozenset(Skill)
EVERY_MODE = frozenset(ThinkingMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What is known of a model from one source, or from several. A skill in neither set is unknown."""

    skills: frozenset[Skill] = frozenset()
    """Skills that it has."""
    lacking: frozenset[Skill] = frozenset()
    """Skills that it does not have."""
    thinking_modes: frozenset[ThinkingMode] = frozenset()
    """How requests may set its thinking; empty: unknown."""
    source_languages: tuple[str, ...] = field(default=(), repr=False)
    """Languages that it translates from; empty: unknown, or it is no translation model."""
    target_languages: tuple[str, ...] = field(default=(), repr=False)
    """Languages that it translates into."""
    voices: tuple[str, ...] = field(default=(), repr=False)
    """Voices that it speaks with, the default one first; empty: unknown, or it does not speak."""

    def completed_by(self, weaker: "Abilities") -> "Abilities":
        """Returns these facts, with those of a weaker source where these say nothing."""
        return Abilities(
            skills=self.skills | (weaker.skills - self.lacking),
            lacking=self.lacking | (weaker.lacking - self.skills),
            thinking_modes=self.thinking_modes or weaker.thinking_modes,
            source_languages=self.source_languages or weaker.source_languages,
            target_languages=self.target_languages or weaker.target_languages,
            voices=self.voices or weaker.voices,
        )

    @property
    def possible_skills(self) -> frozenset[Skill] | None:
        """The skills that a request may need: all that it is not known to lack; None: any."""
        return ANY_SKILL - self.lacking if self.lacking else None


UNKNOWN = Abilities()


_LACKING = {
    Skill.TEXT: "takes no text",
    Skill.IMAGE: "takes no images",
    Skill.AUDIO: "takes no audio",
    Skill.TOOLS: "calls no tools",
}
_UNTAKEN = {ThinkingMode.ENABLED: "does not think", ThinkingMode.DISABLED: "does not answer without thinking"}


def untaken_words(lacking: frozenset[Skill], modes: frozenset[ThinkingMode], mode: ThinkingMode) -> str:
    """Returns what a model does not take of a request, as text; empty: it takes all of it.

    `lacking`: the needed skills that it lacks; `mode`: how the request sets its thinking, `modes`: how it may.
    """
    words = [_LACKING[skill] for skill in sorted(lacking)]
    if not takes_mode(modes, mode):
        words.append("has no switch for its thinking" if modes == {ThinkingMode.DEFAULT} else _UNTAKEN[mode])
    return " and ".join(words)


def untaken_languages(abilities: Abilities, source: str, target: str) -> str:
    """Returns which language of a translation a model does not take, as text; empty: both are taken, or it is unknown.

    Codes are compared without regard to case and to the kind of dash; empty: the request names none.
    """
    for code, known, words in (
        (source, abilities.source_languages, "does not translate from"),
        (target, abilities.target_languages, "does not translate into"),
    ):
        if code and known and _plain_code(code) not in map(_plain_code, known):
            return f"{words} {code[:MAX_SHOWN_CODE_CHARS]}"
    return ""


def _plain_code(code: str) -> str:
    return code.casefold().replace("_", "-")


def takes_mode(modes: frozenset[ThinkingMode], mode: ThinkingMode) -> bool:
    """Whether a request may set the thinking of a model so, or it is unknown."""
    return not modes or mode in modes or mode is ThinkingMode.DEFAULT


def complete_list(skills: frozenset[Skill]) -> Abilities:
    """Returns the abilities of a model whose skills are listed completely; an empty list says nothing."""
    return Abilities(skills=skills, lacking=ANY_SKILL - skills) if skills else UNKNOWN


def known_abilities(*, declared: Abilities, engine: Abilities, files: Abilities = UNKNOWN) -> Abilities:
    """Returns what is known of a model.

    What its engine reports to lack is final, since such requests would fail there. Beyond that its declaration counts,
    then its engine, then its files.
    """
    refused_by_engine = Abilities(lacking=engine.lacking)
    return refused_by_engine.completed_by(declared).completed_by(engine).completed_by(files)


def skills_of(numbers: Collection[int]) -> frozenset[Skill]:
    """Returns the skills of these numbers, without those that this version does not know."""
    return frozenset(skill for skill in Skill if skill.value in numbers)


def reported_over(declared: frozenset[Skill], instance: runner_pb2.InstanceState | None) -> Abilities:
    """Returns what is known of a model in the mesh, by its declared skills and the report of its runner, if any."""
    reported = UNKNOWN
    if instance is not None and instance.HasField("abilities"):
        reported = abilities_of(instance.abilities)
    return known_abilities(declared=complete_list(declared), engine=reported)


def abilities_of(message: model_pb2.ModelAbilities) -> Abilities:
    """Returns the abilities in a message; skills and modes that this version does not know are left out."""
    return Abilities(
        skills=skills_of(message.skills),
        lacking=skills_of(message.lacking),
        thinking_modes=frozenset(mode for mode in ThinkingMode if mode.value in message.thinking_modes),
        source_languages=tuple(message.source_languages),
        target_languages=tuple(message.target_languages),
        voices=tuple(message.voices),
    )


def abilities_message(abilities: Abilities) -> model_pb2.ModelAbilities | None:
    """Returns the message of known abilities; None: nothing is known."""
    if abilities == UNKNOWN:
        return None
    numbers: dict[str, Any] = {
        "skills": sorted(abilities.skills),
        "lacking": sorted(abilities.lacking),
        "thinking_modes": sorted(abilities.thinking_modes),
    }
    return model_pb2.ModelAbilities(
        **numbers,
        source_languages=abilities.source_languages,
        target_languages=abilities.target_languages,
        voices=abilities.voices,
    )
