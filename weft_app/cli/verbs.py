"""The verbs load, unload and flush: their options, actions, and commands.

`weft load` and `weft keys sign load` use the same verb, so a token permits exactly the command's action.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from weft.api.operations.v1 import operation_pb2
from weft.documents.computed import MAX_LOAD_PARAMETERS
from weft.documents.field_names import operation_field
from weft.documents.operation_actions import (
    MEBIBYTE,
    FlushScope,
    Form,
    LoadSettings,
    flush_action,
    load_action,
    pull_action,
    remove_action,
    unload_action,
)
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.errors.validation_words import plain_words
from weft.kernel.models.load_parameters import LoadValue
from weft.kernel.models.model_source import is_hub_id, parse_source
from weft.kernel.values.names import require_name, require_name_of_model
from weft.kernel.values.units import keep_alive_seconds, parse_size
from weft_app.cli.asked_model import AskedModel, asked_to_serve, existing_path
from weft_app.cli.completion import complete_model
from weft_app.cli.options import act_on_each, as_command, naming_fields
from weft_app.cli.targets import selected_names

MembersArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model or a pool.", autocompletion=complete_model)
]

RunnerOption = Annotated[
    str, typer.Option("--runner", help="With a source: runner that serves it. Default: the only one that can.")
]


SelectedModelsOption = Annotated[
    str,
    typer.Option("--selector", "-l", metavar="SELECTOR", help="Label selector of models, such as tier=fast,team=a."),
]
_OF_ONE_MODEL = (("MODEL", "model"), ("--token", "token"), ("--request-id", "request_id"), ("--all", "everything"))
"""Options about the subject of one operation, and their parameters."""
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_KEY = "[key]"
_SHOWN_CHARS = 64
_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "name": "MODEL",
        "contextTokens": "--ctx",
        "quantization": "--quantization",
        "memoryBudgetMb": "--budget",
        "keepAlive": "--keep-alive",
        "parameters": "--set",
        "evictModel": "--evict",
        "replicas": "--replicas",
        "scope": "--all",
        "model": "--model",
        "tenant": "--tenant",
        "tag": "--tag",
        "runner": "--runner",
        "source": "MODEL",
        "authorization": "--token",
        "Idempotency-Key": "--request-id",
    }
)
_OPTION_OF_PARAMETER: Mapping[str, str] = MappingProxyType({"context_tokens": "--ctx"})
"""Options of parameters that --set accepts as well."""


def command(
    verb: Callable[..., operation_pb2.OperationAction], finish: Callable[..., None], text: str, *, selects: bool = False
) -> Callable[..., None]:
    """Returns a command with the options of `verb` and `finish`, which gets the action as first argument.

    `text` is the help of the command. `selects`: it also accepts a selector of models. Errors name options.
    """
    own = inspect.signature(verb).parameters
    shared = dict(list(inspect.signature(finish).parameters.items())[1:])
    parameters = {**own, **shared}
    if selects:
        parameters["selector"] = inspect.Parameter("selector", _KEYWORD, default="", annotation=SelectedModelsOption)
        kind, argument = get_args(own["model"].annotation)
        if own["model"].default is inspect.Parameter.empty:
            parameters["model"] = own["model"].replace(annotation=Annotated[kind | None, argument], default=None)

    def act(arguments: Mapping[str, Any]) -> None:
        with naming_options(arguments.get("parameters") or ()):
            action = verb(**{name: arguments[name] for name in own})
            finish(action, **{name: arguments[name] for name in shared})

    def run(*, selector: str = "", **arguments: Any) -> None:
        if selector:
            for option, name in _OF_ONE_MODEL:
                if arguments.get(name):
                    raise invalid_field("--selector", f"cannot be combined with {option}")
            models = selected_names(arguments["home"], ResourceKind.MODEL, selector, "changed")
            act_on_each(models, lambda name: act(arguments | {"model": name}))
        elif selects and arguments["model"] is None:
            raise invalid_field("MODEL", "name a model, or select models by labels with -l")
        else:
            act(arguments)

    return as_command(run, parameters.values(), text)


def load(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model or pool; or a source such as hf:OWNER/REPO or a short name, to pull and serve it.",
            autocompletion=complete_model,
        ),
    ],
    *,
    name: Annotated[
        str, typer.Option("--name", help="With a source: name of the model. Default: derived from it.")
    ] = "",
    runner: RunnerOption = "",
    context_tokens: Annotated[
        int | None,
        typer.Option("--ctx", "--context-tokens", min=16, max=16_777_216, help="Context of one slot in tokens."),
    ] = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", "-q", help="Quantization of the model, such as q8_0.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="Limit of accelerator memory, such as 8GiB.")
    ] = None,
    evict: Annotated[str, typer.Option("--evict", metavar="MODEL", help="Unload this model first.")] = "",
    replicas: Annotated[
        int, typer.Option("--replicas", min=0, max=64, help="Number of pool members to keep loaded.")
    ] = 0,
    pin: Annotated[bool, typer.Option("--pin", help="Never evict it for another model.")] = False,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            "--keep-alive", metavar="TIME", help="How long it stays loaded after a request: 5m, 0, or -1 for no limit."
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Engine parameter, as NAME=VALUE; `weft describe` lists them."
        ),
    ] = None,
) -> operation_pb2.OperationAction:
    """Returns the action of a load. Raises INVALID_ARGUMENT naming the option."""
    try:
        settings = LoadSettings(
            context_tokens=context_tokens,
            quantization=quantization,
            memory_budget_mb=None if budget is None else _whole_megabytes(parse_size(budget, "--budget")),
            keep_alive=None if keep_alive is None else keep_alive_seconds(keep_alive, "--keep-alive"),
            pin=pin,
            parameters=parse_parameters(parameters or ()),
        )
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(step) for step in found["loc"] if step != _KEY)
        raise invalid_field(option_of(field), plain_words(found["msg"])) from None
    if evict:
        evict = require_name_of_model(evict, "--evict")
    asked = asked_to_serve(model, {"--name": name, "--runner": runner})
    if asked.source and is_hub_id(model) and not (name or runner) and existing_path(model) is None:
        # Unlike `weft run` it accepts no bare hub id: a name with its owner may be mistyped.
        asked = AskedModel(name=model)
    elif asked.source and not asked.name and existing_path(model) is None:
        parse_source(model, "MODEL")
    served = name or asked.name
    if not asked.source:
        served = require_name_of_model(served, "MODEL")
    return load_action(served, settings, evict_model=evict, replicas=replicas, source=asked.source, runner=runner)


def pull(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A source such as hf:OWNER/REPO.")],
    *,
    runner: Annotated[str, typer.Option(help="The runner that pulls it.")] = "",
    form: Annotated[str, typer.Option(help="gguf, or folder.")] = "",
) -> operation_pb2.OperationAction:
    """Returns the action of a pull. Raises INVALID_ARGUMENT naming the option."""
    parse_source(source, "SOURCE")
    if runner:
        require_name(runner, "--runner")
    if form not in ("", "gguf", "folder"):
        raise invalid_field("--form", "must be gguf or folder")
    wanted: Form | None = None if not form else "gguf" if form == "gguf" else "folder"
    return pull_action(source, runner=runner, form=wanted)


def remove(model: MembersArgument) -> operation_pb2.OperationAction:
    """Returns the action of a removal. Raises INVALID_ARGUMENT naming the argument."""
    return remove_action(require_name_of_model(model, "MODEL"))


def unload(model: MembersArgument) -> operation_pb2.OperationAction:
    """Returns the action of an unload. Raises INVALID_ARGUMENT naming the argument."""
    return unload_action(require_name_of_model(model, "MODEL"))


def flush(
    *,
    scope: Annotated[
        FlushScope | None, typer.Option(help="Which prefixes to drop. Default: derived from the other options.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All cached prefixes.")] = False,
    model: Annotated[str, typer.Option(help="Only prefixes of this model.", autocompletion=complete_model)] = "",
    tenant: Annotated[str, typer.Option(help="Only prefixes of this tenant.")] = "",
    tag: Annotated[str, typer.Option(help="Only prefixes with this cache tag.")] = "",
    runner: Annotated[str, typer.Option(help="Only on this runner.")] = "",
) -> operation_pb2.OperationAction:
    """Returns the action of a flush. Raises INVALID_ARGUMENT naming the option."""
    if model:
        model = require_name_of_model(model, "--model")
    if runner:
        require_name(runner, "--runner")
    scope = scope or _flush_scope(everything, model, tenant, tag)
    return flush_action(scope, model=model, tenant=tenant, tag=tag, runner=runner)


def _flush_scope(everything: bool, model: str, tenant: str, tag: str) -> FlushScope:
    """Returns the scope implied by the options. Raises INVALID_ARGUMENT naming the option."""
    if everything:
        if tenant or tag:
            raise invalid_field("--all", "covers everything; omit --tenant and --tag")
        return "all"
    if tag:
        return "tag"
    if tenant:
        return "tenant"
    if model:
        return "model"
    raise WeftError(
        Reason.INVALID_ARGUMENT,
        "say what to flush: --all, --model NAME, --tenant NAME or --tag TAG (weft models flush -h)",
    )


def option_of(field: str, typed: Collection[str] = ()) -> str:
    """Returns the option for a field of an operation document, or the field if there is none.

    `typed` has the parameters given by --set, which also have their own options.
    """
    name, _, parameter = field.partition(".")
    if name == "parameters" and parameter in _OPTION_OF_PARAMETER and parameter not in typed:
        return _OPTION_OF_PARAMETER[parameter]
    option = _OPTIONS.get(name, field)
    return f"{option} {parameter[:_SHOWN_CHARS]}" if parameter and name == "parameters" else option


@contextmanager
def naming_options(words: Sequence[str] = ()) -> Iterator[None]:
    """Replaces fields in errors raised in the block by their options. `words` are those of --set."""
    typed = {word.partition("=")[0] for word in words}
    with naming_fields(lambda field: option_of(operation_field(field), typed)):
        yield


def parse_parameters(words: Sequence[str]) -> dict[str, LoadValue]:
    """Parses `name=value` parameters as numbers, flags (true and false) or text.

    Values such as on and off are for the engine and stay text. Raises INVALID_ARGUMENT.
    """
    if len(words) > MAX_LOAD_PARAMETERS:
        raise invalid_field("--set", f"at most {MAX_LOAD_PARAMETERS}")
    found: dict[str, LoadValue] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise invalid_field("--set", f"must be NAME=VALUE, such as cache_type_k=q8_0; it is {word[:64]}")
        if name in found:
            raise invalid_field("--set", f"{name[:64]} is given twice")
        found[name] = _value(value)
    return found


def _whole_megabytes(size: int) -> int:
    if size < MEBIBYTE:
        raise invalid_field("--budget", "must be at least 1 MiB")
    return size // MEBIBYTE


def _value(text: str) -> LoadValue:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
