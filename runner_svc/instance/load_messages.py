"""Converts load options and load parameters between messages and values."""

from collections.abc import Mapping
from pathlib import Path

from runner_svc.backend.port import Backend
from runner_svc.model_files.gguf import read_gguf_header
from runner_svc.policy.load_options import LoadPlan, LoadSpec
from weft.api.runner.v1 import load_pb2 as pb
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.models.load_parameters import LoadValue, check_parameters, load_value, value_message
from weft.kernel.time.timestamps import duration_of, seconds_of
from weft.kernel.values.names import MAX_NAME_CHARS
from weft.kernel.values.units import FOREVER, MAX_DURATION_SECONDS

MAX_BUDGET_BYTES = 2**50


def load_spec_from(
    options: pb.LoadOptions, backend: Backend, quantizations: Mapping[str, Path], own_quantization: str = ""
) -> LoadSpec:
    """Returns the validated options of a load. `own_quantization`: that of the configured file; empty: unknown.

    Raises INVALID_ARGUMENT naming the option.
    """
    known = {parameter.name: parameter for parameter in backend.load_parameters}
    given = {name: _value_from(value, name) for name, value in options.parameters.items()}
    checked = check_parameters(given, backend.load_parameters, "options.parameters")
    backend.check_load(checked, "options.parameters")  # checked now: an invalid load must not end the current one
    changed = {name: value for name, value in checked.items() if value != load_value(known[name].default)}
    if not 0 <= options.memory_budget_bytes <= MAX_BUDGET_BYTES:
        raise invalid_field("options.memory_budget_bytes", f"must be 0 to {MAX_BUDGET_BYTES}")
    return LoadSpec(
        plan=LoadPlan(
            parameters=changed, quantization=_quantization(options.quantization, quantizations, own_quantization)
        ),
        memory_budget_bytes=options.memory_budget_bytes,
        keep_alive_seconds=_keep_alive(options),
        pin=options.pin,
    )


def own_quantization(model_path: Path | None) -> str:
    """Returns the quantization in the header of a model's file; empty: none, or the file is unreadable."""
    if model_path is None or not model_path.is_file():
        return ""
    try:
        return read_gguf_header(model_path).quantization
    except (WeftError, OSError):
        return ""


def options_message(plan: LoadPlan, keep_alive_seconds: float | None, *, pin: bool) -> pb.LoadOptions:
    """Returns the options of the current or next load as a message."""
    message = pb.LoadOptions(
        parameters={name: value_message(value) for name, value in plan.parameters.items()},
        quantization=plan.quantization,
        pin=pin,
    )
    if keep_alive_seconds is not None:
        message.keep_alive.CopyFrom(duration_of(keep_alive_seconds))
    return message


def _quantization(name: str, known: Mapping[str, Path], own: str) -> str:
    if name in known:
        return name
    if not name or name.lower() == own.lower():
        return ""
    names = ", ".join(sorted({*known, own} - {""})) or "none; declare them in the model's quantizations"
    raise invalid_field("options.quantization", f"{name[:MAX_NAME_CHARS]} is not declared; declared: {names}")


def _keep_alive(options: pb.LoadOptions) -> float:
    if not options.HasField("keep_alive"):
        return FOREVER
    seconds = seconds_of(options.keep_alive)
    if seconds > MAX_DURATION_SECONDS:
        raise invalid_field("options.keep_alive", f"must be at most {MAX_DURATION_SECONDS:.0f} s; negative: no limit")
    return max(seconds, FOREVER)


def _value_from(value: pb.LoadValue, name: str) -> LoadValue:
    found = load_value(value)
    if found is None:
        raise invalid_field(f"options.parameters.{name[:MAX_NAME_CHARS]}", "must have a value")
    return found
