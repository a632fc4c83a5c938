"""The command line of the server program of diffusers: from a model's settings and a load's order."""

from collections.abc import Mapping, Sequence
from typing import get_args

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import word_parameter
from runner_svc.runtimes.diffusers.settings import CpuOffload, DiffusersModel, Dtype, Quantization
from weft.kernel.load_parameters import LoadParameter, LoadValue

SERVER_PROGRAM = "runner_svc.runtimes.diffusers.server"


def server_arguments(model: DiffusersModel, order: LoadOrder, port: int) -> list[str]:
    """Returns the command line after the program."""
    placement = placement_of(model, order.parameters)
    optional = {
        "--variant": model.weights_variant,
        "--steps": model.default_steps,
        "--guidance": model.default_guidance,
        "--strength": model.default_strength,
        "--size-multiple": model.size_multiple,
    }
    switches = {
        "--vae-tiling": model.vae_tiling,
        "--attention-slicing": model.attention_slicing,
        "--no-safety-checker": not model.safety_checker,
    }
    return [
        *("--port", str(port), "--model", str(order.model_path or model.file)),
        *("--threads", str(model.engine_threads), "--family", model.family, "--dtype", placement["dtype"]),
        *("--device", "cpu" if uses_no_device(order) else model.device, "--device-map", model.device_map),
        *("--cpu-offload", placement["cpu_offload"], "--quantization", placement["quantization"]),
        *("--max-steps", str(model.max_steps), "--max-pixels", str(model.max_pixels)),
        *("--max-source-bytes", str(model.max_source_bytes), "--max-source-pixels", str(model.max_source_pixels)),
        *("--preview-side-pixels", str(model.preview_side_pixels)),
        *(word for flag, value in optional.items() if value is not None for word in (flag, str(value))),
        *(flag for flag, is_on in switches.items() if is_on),
        *model.extra_arguments,
    ]


def load_parameters() -> Sequence[LoadParameter]:
    """Returns the load parameters of every model."""
    return (
        word_parameter("dtype", "Type of the numbers.", get_args(Dtype)),
        word_parameter("cpu_offload", "What is kept in the machine's memory.", get_args(CpuOffload)),
        word_parameter("quantization", "Quantization of the weights as they are loaded.", get_args(Quantization)),
    )


def placement_of(model: DiffusersModel, parameters: Mapping[str, LoadValue]) -> dict[str, str]:
    """Returns the load parameters of one load: those given, else as configured."""
    configured = {"dtype": model.dtype, "cpu_offload": model.cpu_offload, "quantization": model.quantization}
    return {name: str(parameters.get(name, value)) for name, value in configured.items()}
