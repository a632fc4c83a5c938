"""The check of a load before an operation is created."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from weft.api.runner.v1 import load_pb2
from weft.api.runner.v1.runner_service_pb2 import InstanceDescription
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.models.load_parameters import check_parameters, load_value


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
            check_parameters(given, member.load_parameters, field)
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
