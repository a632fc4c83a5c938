"""Decides which extra request parameters reach an engine. Pure.

The API defines parameters that every engine should know. Extra parameters are looked up in the list of the engine's
runtime: a listed one is sent if its value is valid, else the request is rejected; an unlisted one is dropped with a
warning. docs/api.md shows the lists.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.grammar_ambiguity import MAX_WAYS, grammar_ways
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.schemas.schema_guard import require_safe_pattern, require_safe_schema

MAX_EXTRA_PARAMETERS = 64
"""Maximum number of extra parameters of a request, and of warnings about them; set by the API."""
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_GRAMMAR_DEPTH = 64
"""Maximum nesting of brackets: engines parse grammars recursively, and deep nesting would crash them."""
MAX_TEMPLATE_ARGUMENT_CHARS = 4 * 1024
MAX_LOOK_BACK_TOKENS = 65_536
"""Maximum look-back: llama.cpp stores that many tokens per request, and 2**31 of them would take 8 GiB."""
_MAX_SHOWN_NAME = 64
_MAX_REPEAT_DIGITS = 5
_GRAMMAR_TEXTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
"""Literals, character sets and comments."""
_REPEATS = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}")
MAX_INT = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterWarning:
    """A parameter that was not used."""

    field: str
    message: str
    """A sentence of at most 500 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedParameters:
    """The accepted extra parameters of a request, and warnings about the others."""

    send: Mapping[str, Any]
    warnings: tuple[ParameterWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Number:
    """A number in an inclusive range."""

    low: float
    high: float
    whole: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise invalid_field(name, "must be an integer" if self.whole else "must be a number")
        if not self.low <= value <= self.high:  # also rejects NaN
            raise invalid_field(name, f"must be {_digits(self.low)} to {_digits(self.high)}")

    def __str__(self) -> str:
        kind = "integer" if self.whole else "number"
        return f"{kind}, {_digits(self.low)} to {_digits(self.high)}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, bool):
            raise invalid_field(name, "must be true or false")

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a list of words."""

    words: tuple[str, ...]

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, str) or value not in self.words:
            raise invalid_field(name, f"must be one of: {', '.join(self.words)}")

    def __str__(self) -> str:
        return "one of " + ", ".join(f"`{word}`" for word in self.words)


@dataclass(frozen=True, slots=True)
class Texts:
    """A list of texts."""

    most: int
    characters: int

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, list) or not 0 < len(value) <= self.most:
            raise invalid_field(name, f"must be a list of 1 to {self.most} texts")
        for index, text in enumerate(value):
            if not isinstance(text, str) or not 0 < len(text) <= self.characters:
                raise invalid_field(f"{name}[{index}]", f"must be a text of 1 to {self.characters} characters")

    def __str__(self) -> str:
        return f"list of 1 to {self.most} texts of at most {self.characters} characters"


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids."""

    most: int

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, list) or len(value) > self.most:
            raise invalid_field(name, f"must be a list of at most {self.most} token ids")
        for index, token in enumerate(value):
            Number(0, MAX_INT, whole=True).check(f"{name}[{index}]", token)

    def __str__(self) -> str:
        return f"list of at most {self.most} token ids"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A GBNF grammar."""

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, str) or len(value) > MAX_GRAMMAR_CHARS:
            raise invalid_field(name, f"must be a text of at most {MAX_GRAMMAR_CHARS:,} characters")
        depth = 0
        for character in value:
            # Brackets in literals count too, which only makes the limit stricter.
            depth += (character == "(") - (character == ")" and depth > 0)
            if depth > MAX_GRAMMAR_DEPTH:
                raise invalid_field(name, f"must have at most {MAX_GRAMMAR_DEPTH} nested brackets")
        if grammar_ways(value) > MAX_WAYS:
            raise invalid_field(name, f"must have at most {MAX_WAYS:,} ways to its next character; remove alternatives")
        for low, high in _REPEATS.findall(_GRAMMAR_TEXTS.sub("", value)):
            if len(low) > _MAX_REPEAT_DIGITS or len(high) > _MAX_REPEAT_DIGITS or int(low or 0) > int(high or low or 0):
                limit = 10**_MAX_REPEAT_DIGITS - 1
                raise invalid_field(name, f"must repeat at most {limit:,} times, the lower number first, as in {{2,9}}")

    def __str__(self) -> str:
        return f"text of at most {MAX_GRAMMAR_CHARS:,} characters, brackets at most {MAX_GRAMMAR_DEPTH} deep"


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON object. The HTTP edge limits its nesting."""

    characters: int

    def check(self, name: str, value: Any) -> None:
        """Raises INVALID_ARGUMENT."""
        if not isinstance(value, dict):
            raise invalid_field(name, "must be an object")
        if len(json.dumps(value)) > self.characters:
            raise invalid_field(name, f"must be at most {self.characters:,} characters as JSON")

    def __str__(self) -> str:
        return f"object of at most {self.characters:,} characters"


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema, with the same limits as schemas in `response_format`."""

    def fitted(self, name: str, value: Any) -> Mapping[str, Any]:
        """Returns the schema for the engine; see SchemaGuard.require_safe. Raises INVALID_ARGUMENT."""
        Document(MAX_GRAMMAR_CHARS).check(name, value)
        return require_safe_schema(value, name, SchemaLimits())

    def __str__(self) -> str:
        return "JSON schema, as of `response_format`"


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """vLLM's constraint on an answer: one member with a schema, pattern, grammar or similar."""

    def fitted(self, name: str, value: Any) -> Mapping[str, Any]:
        """Returns the value for the engine; see Schema.fitted. Raises INVALID_ARGUMENT."""
        Document(MAX_GRAMMAR_CHARS).check(name, value)
        fitted: dict[str, Any] = dict(value)
        if (schema := value.get("json")) is not None:
            fitted["json"] = Schema().fitted(f"{name}.json", _decoded(schema))
        if isinstance(pattern := value.get("regex"), str):
            require_safe_pattern(pattern, f"{name}.regex")
        if isinstance(grammar := value.get("grammar"), str):
            Grammar().check(f"{name}.grammar", grammar)
        return fitted

    def __str__(self) -> str:
        return f"object of at most {MAX_GRAMMAR_CHARS:,} characters; its schema, pattern and grammar are checked"


def _decoded(schema: Any) -> Any:
    """Parses a schema that is given as JSON text, as vLLM allows; returns other text unchanged."""
    with suppress(ValueError, RecursionError):
        return json.loads(schema) if isinstance(schema, str) else schema
    return schema


Rule = Number | Flag | OneOf | Texts | TokenIds | Grammar | Document | Schema | StructuredOutputs

TEMPLATE_ARGUMENTS = "chat_template_kwargs"
_EFFORT = "reasoning_effort"
LOOK_BACK = Number(0, MAX_LOOK_BACK_TOKENS, whole=True)
MIROSTAT: Mapping[str, Rule] = MappingProxyType({"mirostat_tau": Number(0, 100), "mirostat_eta": Number(0, 1)})
"""Mirostat parameters with the same names in every engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParameters:
    """The request parameters of one kind of engine; each runtime declares them in `runtimes/<name>/runtime.py`."""

    engine: str
    """The engine's name in warnings, such as "llama.cpp's server"."""
    allowed: Mapping[str, Rule] = field(default_factory=dict)
    """Supported extra parameters with their allowed values."""
    untaken: frozenset[str] = frozenset()
    """API parameters that it does not support. They are dropped with `untaken_warning`, except several choices (`n`),
    which are rejected because choices would be missing."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """API parameters with another name at the engine, such as `repetition_penalty` for `repeat_penalty`."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Extra parameters that are sent as a member of another one, such as `grammar` of `structured_outputs`."""
    thinks_by_template: bool = False
    """Whether thinking can only be set by chat template arguments: `reasoning_effort: none` is sent as
    `enable_thinking: false`."""
    forces_one_tool: bool = False
    """Whether a required function is sent as the only tool, because the engine ignores a tool choice by name."""
    format_excludes_calls: bool = False
    """Whether tools cannot be called in an answer that must follow a JSON schema."""
    makes_gbnf: bool = False
    """Whether it makes llama.cpp's grammars of JSON schemas, which are rewritten for them."""
    other_sound_name: str = ""
    """The name of recordings other than WAV and MP3, for an engine that takes these two names only and reads the type
    from the bytes, such as FLAC; empty: the type's own name."""
    infills: bool = False
    """Whether it has llama.cpp's route for fill-in-the-middle."""
    is_strict: bool = False
    """Whether it rejects fields that OpenAI does not define."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterProfile:
    """Settings that determine which request parameters reach one model's engine."""

    engine: EngineParameters
    passthrough: bool = False
    """Whether every parameter is sent unchecked, except those that the mesh controls."""
    thinking: bool | None = None
    """Whether the model thinks by default; None: the template's default. A strict engine gets the field only if this is
    set, since it may reject an unknown field."""
    token_limit_name: str = "max_tokens"  # noqa: S105 - a parameter's name
    """The server's name for the limit of an answer's length."""
    most_answer_tokens: int | None = None
    """Maximum limit to send, for a server that rejects one beyond its context; None: any."""
    templates: tuple[str, ...] | None = None
    """The model's chat templates, one of which renders each chat; None: unknown."""


CONTROLLED_BY_MESH = frozenset({
    # the request itself, its model, and the answer's form, for which weft has fields
    "model", "messages", "prompt", "input", "echo", "suffix", "stream", "stream_options", "n", "n_cmpl", "n_predict",
    "max_tokens", "max_completion_tokens", "tools", "tool_choice", "functions", "function_call", "response_format",
    "response_fields", "return_progress", "return_tokens", "n_probs", "post_sampling_probs", "timings_per_token",
    "verbose", "__verbose", "sse_ping_interval", "best_of", "logprobs", "top_logprobs",
    # effects on other requests: slots, caches, adapters and keep-alive
    "id_slot", "cache_prompt", "n_cache_reuse", "n_keep", "n_discard", "lora", "slot_save_path", "keep_alive",
    "options",
    # internals of llama.cpp's server for templates
    "chat_format", "chat_parser", "parse_tool_calls", "generation_prompt", "grammar_type", "grammar_lazy",
    "grammar_triggers", "preserved_tokens", "message_delimiters", "continue_final_message", "add_generation_prompt",
    "backend_sampling", "reasoning_control",
    # what makes an engine open an address or a file, run code, or read another tenant's cache
    "bootstrap_host", "bootstrap_port", "bootstrap_room", "cache_salt", "chat_template", "custom_logit_processor",
    "kv_transfer_params", "lora_path",
})  # fmt: skip
"""Parameters that are never sent, even with `passthrough`."""
MESH_PREFIX = "x_"
"""Prefix of other parameters that are never sent. The HTTP edge removes them; gRPC callers may send them."""

OF_IMAGES: Mapping[str, Rule] = MappingProxyType(
    {
        "background": OneOf(("auto", "opaque", "transparent")),
        "cfg_scale": Number(0, 100),
        "clip_skip": Number(0, 12, whole=True),
        "eta": Number(0, 1),
        "input_fidelity": OneOf(("high", "low")),
        "moderation": OneOf(("auto", "low")),
        "output_compression": Number(0, 100, whole=True),
        "style": OneOf(("natural", "vivid")),
    }
)
"""Extra parameters of images for servers that are not weft's: numbers and words, no addresses, files or adapters."""


def of_images(profile: ParameterProfile) -> ParameterProfile:
    """Returns the profile for images of a server that is not weft's."""
    return replace(profile, engine=replace(profile.engine, allowed=OF_IMAGES))


_SEARCHES = frozenset({"enable_search", "search_parameters", "web_search_options"})
"""Parameters with which providers search the web before they answer."""
_NOTHING = AdmittedParameters(send={})


def admit(extra: Mapping[str, Any], profile: ParameterProfile) -> AdmittedParameters:
    """Admits the extra parameters of a request, as plain JSON data; null counts as absent.

    Raises INVALID_ARGUMENT naming a supported one with an invalid value, or if there are too many.
    """
    if not extra:
        return _NOTHING
    if len(extra) > MAX_EXTRA_PARAMETERS:
        raise invalid_field("extra_parameters", f"must be at most {MAX_EXTRA_PARAMETERS}, are {len(extra)}")
    send: dict[str, Any] = {}
    warnings: list[ParameterWarning] = []
    allowed = profile.engine.allowed
    for name, value in extra.items():
        if value is None:
            continue
        plain = plain_name(name)
        if plain in CONTROLLED_BY_MESH or plain.startswith(MESH_PREFIX):
            warnings.append(_warning(name, "is controlled by the mesh and was not sent"))
        elif profile.passthrough:
            send[name] = value
        elif rule := allowed.get(name):
            if isinstance(rule, Schema | StructuredOutputs):
                send[name] = rule.fitted(name, value)
            else:
                rule.check(name, value)
                send[name] = value
        elif plain in _SEARCHES and value is not False:
            # The model would answer from memory, as if it had searched.
            raise invalid_field(name, f"this model's engine ({profile.engine.engine}) cannot search the web; omit it")
        else:
            message = f"is not supported by this model's engine ({profile.engine.engine}) and was not used"
            warnings.append(_warning(name, message))
    return AdmittedParameters(send=send, warnings=tuple(warnings))


def unread_arguments(arguments: Mapping[str, Any], profile: ParameterProfile) -> tuple[ParameterWarning, ...]:
    """Returns warnings about template arguments that none of the model's templates uses; empty if they are unknown."""
    if profile.templates is None:
        return ()
    unread = (name for name in arguments if not any(name in template for template in profile.templates))
    message = "is not read by this model's chat template and was not used"
    return tuple(_warning(f"{TEMPLATE_ARGUMENTS}.{name}", message) for name in unread)


def unread_effort(is_asked: bool, profile: ParameterProfile) -> tuple[ParameterWarning, ...]:
    """Returns the warning that none of the model's templates reads a reasoning effort; empty if they are unknown."""
    is_read = profile.templates is None or any(_EFFORT in template for template in profile.templates)
    if not is_asked or is_read:
        return ()
    return (_warning(_EFFORT, "is not read by this model's chat template and was not used"),)


def plain_name(name: str) -> str:
    """Returns the name as the most lenient server reads it: servers in Go accept `Stream` for `stream`."""
    return name.strip().casefold()


def untaken_warning(name: str, engine: EngineParameters) -> ParameterWarning:
    """Returns the warning about an API parameter that this engine does not support."""
    return _warning(name, f"is not supported by this model's engine ({engine.engine}) and was not used")


def _warning(name: str, message: str) -> ParameterWarning:
    shown = name if len(name) <= _MAX_SHOWN_NAME else name[: _MAX_SHOWN_NAME - 1] + "…"
    return ParameterWarning(field=shown, message=f"{shown} {message}")


def _digits(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
