"""The chat settings of a model, from its configuration section."""

from datetime import tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from runner_svc.chat.settings import ChatSettings, RepetitionPolicy
from runner_svc.policy.repetition import RepetitionLimits
from runner_svc.policy.signals import SignalDescription, reason_only, signal_catalogue
from runner_svc.runtimes.settings import ModelSettings
from runner_svc.tools.schemas import object_schema
from weft.kernel.errors import invalid_field
from weft_app.config.runner_sections import RunnerSection, SignalSection


def chat_settings(section: RunnerSection, model: ModelSettings) -> ChatSettings:
    """The settings of one model. Raises INVALID_ARGUMENT naming the field."""
    where = f"runners.{section.name}"
    for index, name in enumerate(model.tools):
        if not _is_offered(section, name):
            raise invalid_field(
                f"{where}.models.{model.name}.tools[{index}]", f"{name} is not among the tools of runner {section.name}"
            )
    return ChatSettings(
        system_messages=model.system_messages,
        tools=model.tools,
        repetition=RepetitionPolicy[model.repetition.upper()],
        repetition_limits=RepetitionLimits().scaled(model.repetition_lines, model.repetition_characters),
        default_max_tokens=model.default_max_tokens,
        signals=signal_catalogue(_signals(section.signals, f"{where}.signals")),
        max_tool_iterations=section.max_tool_iterations,
        max_tool_calls_per_turn=section.max_tool_calls_per_turn,
        zone=_zone(section.time_zone, f"{where}.time_zone"),
        platform_context=section.platform_context,
    )


def _is_offered(section: RunnerSection, name: str) -> bool:
    """Whether a source of the runner can have a tool of this name; a server's tools are known once it runs."""
    return any(
        name == tool.name if tool.type == "python" else name.startswith(f"{tool.name}.") for tool in section.tools
    )


def _signals(sections: tuple[SignalSection, ...], where: str) -> list[SignalDescription]:
    signals: dict[str, SignalDescription] = {}
    for signal in sections:
        if signal.name in signals:
            raise invalid_field(f"{where}.{signal.name}", "two signals of one runner cannot share a name")
        try:
            parameters = object_schema(signal.parameters) if signal.parameters else reason_only()
        except ValueError as error:
            raise invalid_field(f"{where}.{signal.name}.parameters", str(error)) from None
        signals[signal.name] = SignalDescription(
            name=signal.name,
            description=signal.description,
            parameters=parameters,
            asks_for_decision=signal.asks_for_decision,
        )
    return list(signals.values())


def _zone(name: str | None, field: str) -> tzinfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise invalid_field(field, f"{name} is no time zone that is known here; such as Europe/Berlin or UTC") from None
