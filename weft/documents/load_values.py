"""Converts load parameters and their values between messages and Python values."""

from weft.api.runner.v1 import load_pb2 as pb
from weft.kernel.load_parameters import LoadParameter, LoadValue


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
