"""Refuses loads that the runner of a model would refuse, before their operation is created."""

from collections.abc import Collection, Iterable, Mapping

from weft.api.runner.v1 import load_pb2
from weft.api.runner.v1.runner_service_pb2 import InstanceDescription
from weft.documents.computed import CONTEXT_TOKENS
from weft.documents.load_values import load_parameter, load_value
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.load_parameters import check_parameters

_GGUF = "gguf"


def require_loadable(
    options: load_pb2.LoadOptions,
    members: Iterable[InstanceDescription],
    own_quantizations: Mapping[str, str],
    *,
    context_field: str = "",
) -> None:
    """Raises INVALID_ARGUMENT naming an option that no member of a pool takes; without members it refuses none.

    `own_quantizations`: those of the configured files, by model; empty: unknown.
    `context_field`: the caller's name of the context; empty: it is a parameter like the others.
    """
    given = {name: found for name, value in options.parameters.items() if (found := load_value(value)) is not None}
    refusal: FieldError | None = None
    for member in members:
        try:
            check_parameters(given, [load_parameter(one) for one in member.load_parameters])
            _check_quantization(options.quantization, member.quantizations, own_quantizations.get(member.model, ""))
        except FieldError as error:
            refusal = refusal or error
        else:
            return
    if refusal is None:
        return
    if context_field and refusal.field == f"parameters.{CONTEXT_TOKENS}":
        raise FieldError(context_field, refusal.message.removeprefix(f"{refusal.field}: "))
    raise refusal


def require_parameters_of_source(
    parameters: Collection[str], source: str, served: Iterable[InstanceDescription]
) -> None:
    """Raises INVALID_ARGUMENT naming a parameter that no engine has for the model of a source, if that is known.

    It is known of GGUF files, by the GGUF models that the runners serve already. Ranges depend on the model.
    """
    if _GGUF not in source.casefold():
        return
    known = {one.name for each in served if each.model_path.casefold().endswith(_GGUF) for one in each.load_parameters}
    unknown = sorted(set(parameters) - known)
    if known and unknown:
        names = ", ".join(sorted(known))
        raise invalid_field(f"parameters.{unknown[0]}", f"cannot be set for this model; what can: {names}")


def _check_quantization(name: str, declared: Collection[str], own: str) -> None:
    if name and name not in declared and name.lower() != own.lower():
        known = ", ".join(sorted({*declared, own} - {""})) or "none; declare them in the model's quantizations"
        raise invalid_field("quantization", f"{name} is not declared; there is: {known}")
