"""Presets: how aliases, agents and models change the parameters of requests. Pure."""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from weft.api.common.v1 import chat_pb2, receipt_pb2, warning_pb2
from weft.api.common.v1.sampling_pb2 import SamplingParams
from weft.dispatch.declared_presets import values_of
from weft.dispatch.payload_description import drop_thinking_argument, needed_thinking
from weft.kernel.requests.capabilities import ThinkingMode

if TYPE_CHECKING:
    from weft.api.registry.v1.agent_pb2 import AgentManifest
    from weft.api.registry.v1.alias_pb2 import AliasManifest
    from weft.dispatch.payload_description import GeneratingPayload

_EFFORT = "REASONING_EFFORT_"


def apply_preset(
    payload: "GeneratingPayload", preset: "AliasManifest | AgentManifest", author: str
) -> list[receipt_pb2.ChangedParameter]:
    """Changes a payload in place; returns its replaced and removed parameters. `author`: such as "alias/claude"."""
    changed = _change(payload, preset.default_params, preset.forced_params, preset.removed_params)
    return [receipt_pb2.ChangedParameter(name=name, author=author, removed=gone) for name, gone in changed.items()]


def fill_defaults(payload: "GeneratingPayload", defaults: SamplingParams) -> None:
    """Sets defaults for unset parameters. Set ones stay, including 0; an empty list counts as unset."""
    _change(payload, defaults, SamplingParams(), ())


def changed_warning(changed: receipt_pb2.ChangedParameter) -> warning_pb2.Warning:
    """Returns the warning about a changed parameter for the caller."""
    message = f"was {'removed' if changed.removed else 'replaced'} by {changed.author}"
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_PARAMETER_CHANGED, field=changed.name, message=message)


def _change(
    payload: "GeneratingPayload", given: SamplingParams, replacing: SamplingParams, gone: Collection[str]
) -> dict[str, bool]:
    """Returns the request's parameters that it replaced (False) or removed (True)."""
    is_chat = isinstance(payload, chat_pb2.ChatPayload)
    defaults, forced = values_of(given, is_chat=is_chat), values_of(replacing, is_chat=is_chat)
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


def _given(payload: "GeneratingPayload") -> dict[str, Any]:
    """Returns the parameters that a request sets."""
    found = values_of(payload.sampling)
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
