"""Presets as aliases, agents and models declare them: read and checked without what changes requests. Pure."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from weft.api.common.v1.sampling_pb2 import SamplingParams
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message

if TYPE_CHECKING:
    from weft.api.registry.v1.agent_pb2 import AgentManifest
    from weft.api.registry.v1.alias_pb2 import AliasManifest

PARAMETERS = tuple(field.name for field in SamplingParams.DESCRIPTOR.fields)
OF_CHATS = ("reasoning_effort", "thinking")
"""Parameters that a chat has outside of its sampling parameters."""


def check_preset(preset: "AliasManifest | AgentManifest", within: str = "") -> None:
    """Raises INVALID_ARGUMENT for an unknown parameter, or one that is changed in two ways; clears empty messages."""
    defaults, forced = values_of(preset.default_params), values_of(preset.forced_params)
    if not defaults:
        preset.ClearField("default_params")
    if not forced:
        preset.ClearField("forced_params")
    for name in defaults.keys() & forced.keys():
        raise invalid_field(f"{within}default_params.{name}", "is also in forced_params; declare it once")
    for index, name in enumerate(preset.removed_params):
        if name not in PARAMETERS:
            raise invalid_field(f"{within}removed_params[{index}]", f"must be one of {', '.join(PARAMETERS)}")
        if name in defaults or name in forced:
            raise invalid_field(f"{within}removed_params[{index}]", f"{name} has a value here; to replace it, force it")


def sampling_of(params: Mapping[str, Any], where: str) -> SamplingParams:
    """Returns the parameters of a setting. Raises INVALID_ARGUMENT naming the field."""
    sampling = SamplingParams()
    # Parsed one by one because the parser's message does not name the invalid parameter.
    for name, value in params.items():
        field = f"{where}.{name}"
        if name not in sampling.DESCRIPTOR.fields_by_name and name not in sampling.DESCRIPTOR.fields_by_camelcase_name:
            raise invalid_field(field, f"is no parameter; known are {', '.join(sampling.DESCRIPTOR.fields_by_name)}")
        if isinstance(value, bool) and name != "thinking":
            raise invalid_field(field, "must be a number, not true or false")
        try:
            json_format.ParseDict({name: value}, sampling)
        except json_format.ParseError:
            raise invalid_field(field, "has a value of the wrong type or out of range") from None
    check_message(sampling, where)
    return sampling


def preset_of(setting: Any, where: str = "") -> dict[str, Any]:
    """Returns the preset of an alias or agent of weft.yaml, as fields of its manifest; raises as `sampling_of`."""
    given = {name: getattr(setting, name) for name in ("default_params", "forced_params")}
    params = {name: sampling_of(values, f"{where}{name}") for name, values in given.items() if values}
    return {**params, "removed_params": setting.removed_params}


def values_of(params: SamplingParams, *, is_chat: bool = True) -> dict[str, Any]:
    """Returns the set parameters by name. `is_chat`: those of chats too."""
    return {field.name: value for field, value in params.ListFields() if is_chat or field.name not in OF_CHATS}
