"""Known capabilities of a model beyond plain text: skills, thinking modes, languages and voices."""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from weft.api.registry.v1 import model_pb2, runner_pb2
from weft.kernel.requests.request_values import Skill


class ThinkingMode(IntEnum):
    """How a request sets a model's thinking; numbers as in `registry.v1.ThinkingMode`."""

    DEFAULT = 1
    ENABLED = 2
    DISABLED = 3


MAX_SHOWN_CODE_CHARS = 64
"""Maximum characters of a language code that an error quotes."""
ANY_SKILL = frozenset(Skill)
EVERY_MODE = frozenset(ThinkingMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Capabilities of a model, from one source or merged from several. A skill in neither set is unknown."""

    skills: frozenset[Skill] = frozenset()
    lacking: frozenset[Skill] = frozenset()
    """Skills that the model is known not to have."""
    thinking_modes: frozenset[ThinkingMode] = frozenset()
    """Modes that requests may set; empty: unknown."""
    source_languages: tuple[str, ...] = field(default=(), repr=False)
    """Languages it translates from; empty: unknown, or not a translation model."""
    target_languages: tuple[str, ...] = field(default=(), repr=False)
    voices: tuple[str, ...] = field(default=(), repr=False)
    """Voices it speaks with, the default first; empty: unknown, or not a speech model."""

    def completed_by(self, weaker: "Capabilities") -> "Capabilities":
        """Returns these capabilities, with gaps filled from a less authoritative source."""
        return Capabilities(
            skills=self.skills | (weaker.skills - self.lacking),
            lacking=self.lacking | (weaker.lacking - self.skills),
            thinking_modes=self.thinking_modes or weaker.thinking_modes,
            source_languages=self.source_languages or weaker.source_languages,
            target_languages=self.target_languages or weaker.target_languages,
            voices=self.voices or weaker.voices,
        )

    @property
    def possible_skills(self) -> frozenset[Skill] | None:
        """Skills that a request may need: all that the model is not known to lack; None: any."""
        return ANY_SKILL - self.lacking if self.lacking else None


UNKNOWN = Capabilities()


_LACKING = {
    Skill.TEXT: "does not support text",
    Skill.IMAGE: "does not support images",
    Skill.AUDIO: "does not support audio",
    Skill.TOOLS: "does not support tools",
}
_UNTAKEN = {
    ThinkingMode.ENABLED: "does not support thinking",
    ThinkingMode.DISABLED: "does not answer without thinking",
}


def untaken_words(lacking: frozenset[Skill], modes: frozenset[ThinkingMode], mode: ThinkingMode) -> str:
    """Returns what a model does not support in a request, as text; empty if it supports everything.

    `lacking` are the needed skills that the model lacks; `mode` is the requested thinking mode, `modes` those allowed.
    """
    words = [_LACKING[skill] for skill in sorted(lacking)]
    if not takes_mode(modes, mode):
        words.append("has no setting for thinking" if modes == {ThinkingMode.DEFAULT} else _UNTAKEN[mode])
    return " and ".join(words)


def untaken_languages(capabilities: Capabilities, source: str, target: str) -> str:
    """Returns which language of a translation a model does not support, as text; empty if none is known to be missing.

    Codes are compared ignoring case, with `_` as `-`. An empty code means that the request names no language.
    """
    for code, known, words in (
        (source, capabilities.source_languages, "does not translate from"),
        (target, capabilities.target_languages, "does not translate into"),
    ):
        if code and known and _plain_code(code) not in map(_plain_code, known):
            return f"{words} {code[:MAX_SHOWN_CODE_CHARS]}"
    return ""


def _plain_code(code: str) -> str:
    return code.casefold().replace("_", "-")


def takes_mode(modes: frozenset[ThinkingMode], mode: ThinkingMode) -> bool:
    """Whether a model supports a thinking mode; True if its modes are unknown."""
    return not modes or mode in modes or mode is ThinkingMode.DEFAULT


def complete_list(skills: frozenset[Skill]) -> Capabilities:
    """Returns the capabilities of a model that has exactly these skills; UNKNOWN if there are none."""
    return Capabilities(skills=skills, lacking=ANY_SKILL - skills) if skills else UNKNOWN


def known_capabilities(*, declared: Capabilities, engine: Capabilities, files: Capabilities = UNKNOWN) -> Capabilities:
    """Returns the capabilities of a model, merged from all sources.

    Skills that the engine reports as missing are final, since such requests would fail there. Otherwise the declaration
    takes precedence, then the engine, then the files.
    """
    refused_by_engine = Capabilities(lacking=engine.lacking)
    return refused_by_engine.completed_by(declared).completed_by(engine).completed_by(files)


def skills_of(numbers: Collection[int]) -> frozenset[Skill]:
    """Returns the skills with these numbers; unknown numbers are left out."""
    return frozenset(skill for skill in Skill if skill.value in numbers)


def reported_over(declared: frozenset[Skill], instance: runner_pb2.InstanceState | None) -> Capabilities:
    """Returns the capabilities of a model in the mesh, from its declared skills and its runner's report, if any."""
    reported = UNKNOWN
    if instance is not None and instance.HasField("abilities"):
        reported = capabilities_of(instance.abilities)
    return known_capabilities(declared=complete_list(declared), engine=reported)


def capabilities_of(message: model_pb2.ModelAbilities) -> Capabilities:
    """Returns the capabilities in a message; unknown skills and modes are left out."""
    return Capabilities(
        skills=skills_of(message.skills),
        lacking=skills_of(message.lacking),
        thinking_modes=frozenset(mode for mode in ThinkingMode if mode.value in message.thinking_modes),
        source_languages=tuple(message.source_languages),
        target_languages=tuple(message.target_languages),
        voices=tuple(message.voices),
    )


def capabilities_message(capabilities: Capabilities) -> model_pb2.ModelAbilities | None:
    """Returns capabilities as a message; None if nothing is known."""
    if capabilities == UNKNOWN:
        return None
    numbers: dict[str, Any] = {
        "skills": sorted(capabilities.skills),
        "lacking": sorted(capabilities.lacking),
        "thinking_modes": sorted(capabilities.thinking_modes),
    }
    return model_pb2.ModelAbilities(
        **numbers,
        source_languages=capabilities.source_languages,
        target_languages=capabilities.target_languages,
        voices=capabilities.voices,
    )
