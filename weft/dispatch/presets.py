"""Presets: how aliases, agents and models change the parameters of requests. Pure."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from weft.api.common.v1 import chat_pb2, receipt_pb2, warning_pb2
from weft.api.common.v1.sampling_pb2 import SamplingParams as _Params
from weft.dispatch.payload_description import drop_thinking_argument, needed_thinking
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.schemas.field_rules import check_message

if TYPE_CHECKING:
    from weft.api.registry.v1.agent_pb2 import AgentManifest
    from weft.api.registry.v1.alias_pb2 import AliasManifest
    from weft.dispatch.payload_description import GeneratingPayload

PARAMETERS = tuple(field.name for field in _Params.DESCRIPTOR.fields)
OF_CHATS = ("reasoning_effort", "thinking")
"""Parameters that a chat has outside of its sampling parameters."""
_EFFORT = "REASONING_EFFORT_"


def check_preset(preset: "AliasManifest | AgentManifest", within: str = "") -> None:
    """Raises INVALID_ARGUMENT for an unknown parameter, or one that is changed in two ways; clears empty messages."""
    defaults, forced = _values(preset.default_params), _values(preset.forced_params)
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


def apply_preset(
    payload: "GeneratingPayload", preset: "AliasManifest | AgentManifest", author: str
) -> list[receipt_pb2.ChangedParameter]:
    """Changes a payload in place; returns its replaced and removed parameters. `author`: such as "alias/claude"."""
    changed = _change(payload, preset.default_params, preset.forced_params, preset.removed_params)
    return [receipt_pb2.ChangedParameter(name=name, author=author, removed=gone) for name, gone in changed.items()]


def fill_defaults(payload: "GeneratingPayload", defaults: _Params) -> None:
    """Sets defaults for unset parameters. Set ones stay, including 0; an empty list counts as unset."""
    _change(payload, defaults, _Params(), ())


def changed_warning(changed: receipt_pb2.ChangedParameter) -> warning_pb2.Warning:
    """Returns the warning about a changed parameter for the caller."""
    message = f"was {'removed' if changed.removed else 'replaced'} by {changed.author}"
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_PARAMETER_CHANGED, field=changed.name, message=message)


def _change(payload: "GeneratingPayload", given: _Params, replacing: _Params, gone: Collection[str]) -> dict[str, bool]:
    """Returns the request's parameters that it replaced (False) or removed (True)."""
    is_chat = isinstance(payload, chat_pb2.ChatPayload)
    defaults, forced = _values(given, is_chat=is_chat), _values(replacing, is_chat=is_chat)
    before = _given(payload)
    # A request that sets one of the two also decides the other.
    if "reasoning_effort" in before:
        defaults.pop("thinking", None)
    if before.get("thinking") is False:
        defaults.pop("reasoning_effort", None)
    after = defaults | {name: value for name, value in before.items() if name not in gone} | forced
    changed = {name: name not in after for name, value in before.items() if after.get(name) != value}
    for name in changed.keys() | (after.keys() - before.keys()):
        _set(payload, name, after.get(name))
    return changed


def _values(params: _Params, *, is_chat: bool = True) -> dict[str, Any]:
    return {field.name: value for field, value in params.ListFields() if is_chat or field.name not in OF_CHATS}


def _given(payload: "GeneratingPayload") -> dict[str, Any]:
    """Returns the parameters that a request sets."""
    found = _values(payload.sampling)
    if isinstance(payload, chat_pb2.ChatPayload):
        if payload.reasoning_effort:
            name = chat_pb2.ReasoningEffort.Name(payload.reasoning_effort)
            found["reasoning_effort"] = name.removeprefix(_EFFORT).lower()
        if (thinking := needed_thinking(payload)) is not ThinkingMode.DEFAULT:
            found["thinking"] = thinking is ThinkingMode.ENABLED
    return found


def _set(payload: Any, name: str, value: Any) -> None:
    """Sets a parameter; None: clears it."""
    if name == "reasoning_effort":
        payload.reasoning_effort = chat_pb2.ReasoningEffort.Value(f"{_EFFORT}{(value or 'unspecified').upper()}")
        return
    holder = payload if name == "thinking" else payload.sampling
    holder.ClearField(name)
    if name == "thinking":
        drop_thinking_argument(payload)
    if value is not None:
        holder.MergeFrom(type(holder)(**{name: value}))


def sampling_of(params: Mapping[str, Any], where: str) -> _Params:
    """Returns the parameters of a setting. Raises INVALID_ARGUMENT naming the field."""
    sampling = _Params()
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
