"""Load parameters and their values as messages, and the check of a load before an operation is created."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from weft.api.runner.v1 import load_pb2
from weft.api.runner.v1 import load_pb2 as pb
from weft.api.runner.v1.runner_service_pb2 import InstanceDescription
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue, check_parameters


def load_value(message: pb.LoadValue) -> LoadValue | None:
    """Returns the value of a message; None: it is unset."""
    match message.WhichOneof("kind"):
        case "integer":
            return message.integer
        case "number":
            return message.number
        case "word":
            return message.word
        case "flag":
            return message.flag
    return None


def value_message(value: LoadValue) -> pb.LoadValue:
    """Returns a value as a message."""
    if isinstance(value, bool):
        return pb.LoadValue(flag=value)
    if isinstance(value, int):
        return pb.LoadValue(integer=value)
    return pb.LoadValue(number=value) if isinstance(value, float) else pb.LoadValue(word=value)


def load_parameter(message: pb.LoadParameter) -> LoadParameter:
    """Returns a parameter."""
    return LoadParameter(
        name=message.name,
        description=message.description,
        words=tuple(message.words),
        minimum=message.minimum if message.HasField("minimum") else None,
        maximum=message.maximum if message.HasField("maximum") else None,
        integer=message.integer,
        flag=message.flag,
        default=load_value(message.default),
    )


def parameter_message(parameter: LoadParameter) -> pb.LoadParameter:
    """Returns a parameter as a message."""
    return pb.LoadParameter(
        name=parameter.name,
        description=parameter.description,
        words=parameter.words,
        minimum=parameter.minimum,
        maximum=parameter.maximum,
        integer=parameter.integer,
        flag=parameter.flag,
        default=None if parameter.default is None else value_message(parameter.default),
    )


def require_loadable(
    options: load_pb2.LoadOptions,
    members: Iterable[InstanceDescription],
    own_quantizations: Mapping[str, str] = MappingProxyType({}),
    *,
    field: str = "parameters",
) -> None:
    """Raises INVALID_ARGUMENT naming an option that no member of a pool supports; a pool without members accepts all.

    `own_quantizations`: the quantization of the configured file, by model; empty: unknown.
    `field`: the path of the parameters.
    """
    given = {name: found for name, value in options.parameters.items() if (found := load_value(value)) is not None}
    refusal: FieldError | None = None
    for member in members:
        try:
            check_parameters(given, [load_parameter(one) for one in member.load_parameters], field)
            _check_quantization(options.quantization, member.quantizations, own_quantizations.get(member.model, ""))
        except FieldError as error:
            refusal = refusal or error
        else:
            return
    if refusal is not None:
        raise refusal


def _check_quantization(name: str, declared: Collection[str], own: str) -> None:
    if name and name not in declared and name.lower() != own.lower():
        known = ", ".join(sorted({*declared, own} - {""})) or "none; declare them in the model's quantizations"
        raise invalid_field("quantization", f"{name} is not declared; there is: {known}")
