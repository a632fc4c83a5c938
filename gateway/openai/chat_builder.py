"""The builder of chat payloads for all chat APIs: messages, tools, tool choice, output schema and thinking."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Protocol, TypeVar

from gateway.answers.server_tools import ServerTool
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.request_model import require_few
from gateway.media import RequestMedia
from gateway.openai.chat_schema import AudioUrl, ImageUrl, InputAudio, TemplateArguments
from gateway.openai.extension_fields import fill_extra, unsupported
from gateway.openai.readable_text import file_text, text_in
from gateway.server_tools.request_tools import Asked, RequestTools
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.extra_fields import handed_back
from weft.dispatch.history import answered_turns, converted, earlier_turns, left_out_note
from weft.dispatch.payload_checks import part_left_out
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.schemas.schema_guard import SchemaGuard
from weft.kernel.text.json_objects import to_json_object

FUNCTION = "function"
ROLES: Mapping[str, chat_pb2.Role.ValueType] = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
    "function": chat_pb2.ROLE_TOOL,
}
_TOOL_MODES: Mapping[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "required": chat_pb2.ToolChoice.MODE_REQUIRED,
    "any": chat_pb2.ToolChoice.MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """A chat payload, with warnings for the caller."""

    payload: chat_pb2.ChatPayload
    warnings: list[warning_pb2.Warning] = dataclass_field(default_factory=list)
    failing: ServerTool | None = None
    """A server's tool whose failure is the answer; None: the model answers."""
    hosted: RequestTools | None = None
    """The tools of servers that the gateway runs for it; None: none."""


class Described(Protocol):
    """Common fields of the schemas of functions and of output formats."""

    @property
    def description(self) -> str | None:
        """Its purpose, for the model."""
        ...

    @property
    def strict(self) -> bool | None:
        """Whether the schema must be followed exactly."""
        ...


class TypedPart(Protocol):
    """A content part with a type; its content is in one of its members."""

    @property
    def type(self) -> str:
        """Its type."""
        ...

    @property
    def text(self) -> str | None:
        """Its text, if it has one."""
        ...

    @property
    def model_extra(self) -> dict[str, Any] | None:
        """Members that the schema does not know."""
        ...


class TemplateOptions(Protocol):
    """Request fields about the model's chat template."""

    @property
    def enable_thinking(self) -> bool | None:
        """Whether the model thinks."""
        ...

    @property
    def chat_template_kwargs(self) -> TemplateArguments | None:
        """Arguments of the template."""
        ...


_ORPHAN = "Result of a tool call that is no longer in the conversation:\n"
_FILES = frozenset({"file", "input_file"})
_MAX_SHOWN_CHARS = 64

PartT = TypeVar("PartT")
EntryT = TypeVar("EntryT")


def entries(
    given: Sequence[EntryT] | None, field: str, most: int, what: str = "entries"
) -> Iterator[tuple[str, EntryT]]:
    """Yields the path of each entry and the entry. Raises INVALID_ARGUMENT naming `field` above `most`."""
    require_few(given, field, most, what)
    for index, entry in enumerate(given or ()):
        yield f"{field}[{index}]", entry


class ChatBuilder:
    """Builds one chat payload from what an API reads from its request.

    Methods with a `field`, a path in the request, raise INVALID_ARGUMENT naming it.
    """

    def __init__(self, limits: RequestLimits, media: RequestMedia | None = None) -> None:
        """`media` collects the URLs to fetch; None: URLs are refused."""
        self.payload = chat_pb2.ChatPayload()
        self.messages = self.payload.messages
        """The messages so far."""
        self.warnings: list[warning_pb2.Warning] = []
        """Warnings for the caller."""
        self._media = media or RequestMedia(MediaConfig())
        self._limits = limits
        self._guard: SchemaGuard | None = None
        """Shared by all schemas of a request; None: no schema yet."""
        self._calls: set[str] = set()
        self._earlier: list[bool] = []
        self._answered: list[bool] = []
        self.is_earlier = False
        """Whether added content is history (see `earlier_turns`), which is converted if engines do not support it."""
        self.is_answered = False
        """Whether it belongs to an earlier turn by its position alone, see `answered_turns`."""

    def expect(self, roles: Sequence[chat_pb2.Role.ValueType]) -> None:
        """Sets the roles of the conversation, before its messages are added with `turn_to`."""
        self._earlier, self._answered = earlier_turns(roles), answered_turns(roles)

    def turn_to(self, index: int) -> None:
        """Begins the message at this position of the conversation."""
        self.is_earlier, self.is_answered = self._earlier[index], self._answered[index]

    def add_message(self, role: str) -> chat_pb2.ChatMessage:
        """Adds a message without content."""
        return self.messages.add(role=ROLES[role])

    def add_call(
        self,
        message: chat_pb2.ChatMessage,
        call_id: str,
        name: str,
        arguments: str,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Adds a tool call to an assistant's message. `extra`: fields of the call that weft does not know."""
        self._calls.add(call_id)
        call = message.tool_calls.add(id=call_id, name=name, arguments_text=arguments)
        if (fields := handed_back(extra)).fields:
            call.extra_fields.CopyFrom(fields)

    def has_call(self, call_id: str) -> bool:
        """Whether an earlier message has this call."""
        return call_id in self._calls

    def add_result(self, call_id: str) -> chat_pb2.ChatMessage:
        """Adds a message with the result of a tool call."""
        return self.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=call_id)

    def add_orphan(
        self, call_id: str, field: str, problem: str, *, may_be_lost: bool = False
    ) -> chat_pb2.ChatMessage | None:
        """Adds a user message for the result of a call that the conversation lacks; returns None if it has the call.

        Raises INVALID_ARGUMENT with `problem` unless an earlier turn has the result, since clients shorten their
        history, or the call `may_be_lost`.
        """
        if call_id in self._calls:
            return None
        if not (self.is_answered or may_be_lost):
            raise invalid_field(field, problem)
        self.warnings.append(converted(field, problem))
        message = self.messages.add(role=chat_pb2.ROLE_USER)
        message.content.add(text=_ORPHAN)
        return message

    def add_readable(self, message: chat_pb2.ChatMessage, text: str, what: str, field: str, problem: str) -> None:
        """Adds the text of content that engines do not support, or a note if it has none; `what` names it.

        Without text it is rejected with `problem`, unless it is history.
        """
        if not text and not self.is_earlier:
            raise invalid_field(field, problem)
        message.content.add(text=text or left_out_note(what, "weft does not support it"))
        self.warnings.append(
            unsupported(field, f"{what} became text: engines take no content of this kind")
            if text
            else converted(field, problem)
        )

    def add_content(
        self,
        message: chat_pb2.ChatMessage,
        content: str | Sequence[PartT],
        field: str,
        add_part: Callable[[chat_pb2.ChatMessage, PartT, str], None],
    ) -> None:
        """Adds text, or parts by `add_part`, which gets the message, a part and its path."""
        if isinstance(content, str):
            message.content.add(text=content)
            return
        for index, part in enumerate(content):
            add_part(message, part, f"{field}[{index}]")

    def add_part(
        self, message: chat_pb2.ChatMessage, part: TypedPart, field: str, members: Mapping[str, str], types: str
    ) -> None:
        """Adds a content part. `members`: the member with the content, by type; `types`: the types in words."""
        member = members.get(part.type)
        if member is None:
            given = part.model_extra or {}
            nested = given.get("file")
            text = file_text(nested if isinstance(nested, dict) else given) if part.type in _FILES else ""
            if self.is_earlier:
                text = text or part.text or text_in(given)
            self.add_readable(message, text, part.type[:_MAX_SHOWN_CHARS], f"{field}.type", f"must be {types}")
            return
        content = getattr(part, member)
        if content is None:
            if self.is_earlier:
                return
            raise invalid_field(f"{field}.{member}", "is required for a part of this type")
        if member == "text":
            message.content.add(text=content)
        elif member == "refusal":
            message.refusal += content
        elif isinstance(content, InputAudio):
            self._add_audio(message, content.data, f"{field}.{member}.data")
        elif isinstance(content, AudioUrl):
            self._add_audio(message, content.url, f"{field}.{member}.url")
        elif isinstance(content, ImageUrl):
            self.add_image(message, content.url, f"{field}.{member}.url", content.detail)
        else:
            self.add_image(message, content, f"{field}.{member}", getattr(part, "detail", None))

    def add_image(self, message: chat_pb2.ChatMessage, url: str, field: str, detail: str | None = None) -> None:
        """Adds an image by its URL."""
        optional = self.is_earlier
        self._add_media(
            message,
            "image",
            lambda: {"image": self._media.image(url, field, detail=detail or "", optional=optional)},
        )

    def add_encoded_image(self, message: chat_pb2.ChatMessage, data: str, field: str) -> None:
        """Adds an image in base64 or as a data: URL."""
        self._add_media(message, "image", lambda: {"image": self._media.encoded_image(data, field)})

    def _add_audio(self, message: chat_pb2.ChatMessage, data: str, field: str) -> None:
        self._add_media(message, "recording", lambda: {"audio": self._media.encoded_audio(data, field)})

    def _add_media(
        self, message: chat_pb2.ChatMessage, what: str, read: Callable[[], Mapping[str, chat_pb2.MediaPart]]
    ) -> None:
        """Adds an image or a recording; in history, a note in place of an invalid one."""
        try:
            part = chat_pb2.ContentPart(**read())  # type: ignore[arg-type]  # one member of its own name
        except FieldError as error:
            if not self.is_earlier:
                raise
            problem = error.message.removeprefix(f"{error.field}: ")
            message.content.add(text=left_out_note(what, f"it {problem}"))
            self.warnings.append(converted(error.field, problem))
        else:
            message.content.append(part)

    def add_function(self, name: str, tool: Described, schema: Mapping[str, Any] | None, field: str) -> None:
        """Offers a function to the model. `schema`: of its arguments, at `field`; None: it has no arguments.

        Parts that no engine should see are left out with a warning: a tool server's bad schema must not fail a request.
        """
        target = self.payload.tools.add().function
        target.name = name
        _describe(target, tool)
        if schema is not None:
            fitted, faults = self._schemas().fitted(schema, field)
            self.warnings += map(part_left_out, faults)
            target.parameters.CopyFrom(to_json_object(fitted, field))

    def offers(self, name: str) -> bool:
        """Whether a function has this name."""
        return any(tool.function.name == name for tool in self.payload.tools)

    def add_hosted(self, hosted: RequestTools, asked: Asked, unused: Collection[str]) -> str | None:
        """Offers a tool that the gateway runs; None: it is offered, otherwise why not, empty if weft cannot run it.

        `unused`: its parameters that get a warning. Raises as `RequestTools.offer`.
        """
        found = hosted.offer(asked, self.offers)
        if isinstance(found, str):
            return found
        self.add_function(found.name, found, found.tool.parameters, asked.field)
        self.warnings += [unsupported(f"{asked.field}.{name}", "is not used") for name in unused]
        return None

    def choose_mode(self, mode: str, field: str, problem: str | None = None) -> None:
        """Sets whether a tool must be called; rejected, with `problem` if given, if there is no tool."""
        if mode in {"required", "any"} and not self.payload.tools:
            raise invalid_field(field, problem or f"cannot be '{mode}' without a tool of type 'function'")
        self.payload.tool_choice.mode = _TOOL_MODES[mode]

    def choose_function(self, name: str, field: str, problem: str = "names none of the tools") -> None:
        """Sets the function that must be called; rejected with `problem` unless it is offered."""
        self.require_offered((name,), field, problem)
        self.payload.tool_choice.function_name = name

    def require_offered(
        self, names: Collection[str | None], field: str, problem: str = "names none of the tools"
    ) -> None:
        """Raises INVALID_ARGUMENT with `problem` unless all names are functions that are offered to the model."""
        if not {tool.function.name for tool in self.payload.tools}.issuperset(names):
            raise invalid_field(field, problem)

    def keep_functions(self, names: Collection[str | None], field: str) -> None:
        """Removes all other functions, since engines cannot choose among several. Rejects an empty set."""
        if not names:
            raise invalid_field(field, "must have a tool of type 'function'")
        tools = self.payload.tools
        kept = [tool for tool in tools if tool.function.name in names]
        del tools[:]
        tools.extend(kept)

    def set_plain_format(self, kind: str, schema: Mapping[str, Any] | None) -> bool:
        """Sets an answer format without a schema. Returns False if the format has a schema."""
        target = self.payload.response_format
        if kind == "text":
            target.text = True
        elif kind == "json_object" and schema is None:
            target.json_object = True
        else:
            return False
        return True

    def set_schema(self, name: str, output: Described | None, schema: Mapping[str, Any], field: str) -> None:
        """Sets the schema that the answer must follow."""
        target = self.payload.response_format.json_schema
        target.name = name
        if output is not None:
            _describe(target, output)
        target.schema.CopyFrom(to_json_object(self._schemas().require_safe(schema, field), field))

    def _schemas(self) -> SchemaGuard:
        if self._guard is None:
            self._guard = SchemaGuard(self._limits.schemas)
        return self._guard

    def set_thinking(self, options: TemplateOptions, thinking: bool | None = None) -> None:
        """Sets whether the model thinks. `thinking`: an additional field. Rejects fields that differ."""
        arguments = options.chat_template_kwargs
        if arguments is None and thinking is None and options.enable_thinking is None:
            return
        spellings = {
            "enable_thinking": options.enable_thinking,
            "thinking": thinking,
            "chat_template_kwargs.enable_thinking": None if arguments is None else arguments.enable_thinking,
        }
        given = {name: value for name, value in spellings.items() if value is not None}
        if len(set(given.values())) > 1:
            first, *others = given
            raise invalid_field(others[-1], f"must not differ from '{first}'")
        if given:
            self.payload.thinking = next(iter(given.values()))

    def set_effort(self, effort: str | None) -> None:
        """Sets how much the model thinks, if the request says so."""
        if effort is not None:
            self.payload.reasoning_effort = chat_pb2.ReasoningEffort.Value(f"REASONING_EFFORT_{effort.upper()}")

    def set_extra(
        self, given: Mapping[str, object], options: TemplateOptions, template: Mapping[str, object] | None = None
    ) -> None:
        """Sets the fields to pass to the engine, including those of the chat template; `template`: additional ones."""
        arguments = options.chat_template_kwargs
        passed = dict((arguments and arguments.model_extra) or {}) | dict(template or {})
        if passed:
            given = {**given, "chat_template_kwargs": passed}
        fill_extra(self.payload.extra_parameters, given)


def _describe(target: chat_pb2.FunctionTool | chat_pb2.JsonSchemaFormat, source: Described) -> None:
    if source.description is not None:
        target.description = source.description
    if source.strict is not None:
        target.strict = source.strict
