"""What a model of llama.cpp's server takes by its files, before a load."""

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
