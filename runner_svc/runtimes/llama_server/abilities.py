"""What a model of llama.cpp's server takes: by its files before a load, by the server's own properties after it."""

from collections.abc import Sequence
from pathlib import Path

from runner_svc.model_files.gguf import is_gguf, read_gguf_header
from runner_svc.policy.template_abilities import abilities_of_templates
from runner_svc.runtimes.llama_server.arguments import PROJECTOR_FLAGS, names_flag, names_template
from runner_svc.runtimes.llama_server.settings import LlamaServerModel
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError
from weft.kernel.request import Skill

_MEDIA = frozenset({Skill.IMAGE, Skill.AUDIO})
_USUAL_PROJECTOR = Abilities(skills=frozenset({Skill.IMAGE}))
"""Of audio nothing is known then."""
_HUB_FLAGS = ("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "--mmproj-auto")
"""Flags with which the server may find a projector by itself."""


def file_abilities(model: LlamaServerModel, templates: Sequence[str]) -> Abilities:
    """Returns what the files of a model show. Blocks for the time of reading a projector's header."""
    text = Abilities(skills=frozenset({Skill.TEXT}))
    shown = UNKNOWN if names_template(model) else abilities_of_templates(templates)
    return text.completed_by(_media_abilities(model)).completed_by(shown)


def _media_abilities(model: LlamaServerModel) -> Abilities:
    if model.projector_file is not None:
        return projector_abilities(model.projector_file)
    if names_flag(model.extra_arguments, PROJECTOR_FLAGS):
        return _USUAL_PROJECTOR
    return UNKNOWN if names_flag(model.extra_arguments, _HUB_FLAGS) else Abilities(lacking=_MEDIA)


def projector_abilities(file: Path) -> Abilities:
    """Returns what a projector encodes, by its header, or what most of them do where it does not say."""
    try:
        header = read_gguf_header(file) if is_gguf(file) else None
    except (OSError, WeftError):
        header = None
    flags = {} if header is None else {Skill.IMAGE: header.encodes_images, Skill.AUDIO: header.encodes_audio}
    # A projector that encodes one of them says nothing about the other.
    found = frozenset(skill for skill, flag in flags.items() if flag)
    return Abilities(skills=found, lacking=_MEDIA - found) if found else _USUAL_PROJECTOR


def reported_abilities(*, modalities: object, template_caps: object, templates: Sequence[object]) -> Abilities:
    """Returns what a server's properties show. They may have any type; those of another type say nothing."""
    texts = [text for text in templates if isinstance(text, str) and text]
    return (
        UNKNOWN.completed_by(_of_flags({"vision": Skill.IMAGE, "audio": Skill.AUDIO}, modalities))
        .completed_by(_of_template_caps(template_caps))
        .completed_by(abilities_of_templates(texts))
    )


def _of_flags(names: dict[str, Skill], flags: object) -> Abilities:
    values = {skill: flags.get(name) for name, skill in names.items()} if isinstance(flags, dict) else {}
    return Abilities(
        skills=frozenset(skill for skill, value in values.items() if value is True),
        lacking=frozenset(skill for skill, value in values.items() if value is False),
    )


def _of_template_caps(caps: object) -> Abilities:
    """Returns whether the template takes tools: described by itself, or at least as calls of earlier turns."""
    if not isinstance(caps, dict):
        return UNKNOWN
    values = [caps.get(name) for name in ("supports_tools", "supports_tool_calls")]
    tools = frozenset({Skill.TOOLS})
    if True in values:
        return Abilities(skills=tools)
    return Abilities(lacking=tools) if values == [False, False] else UNKNOWN
