"""The runtime diffusers: pipelines of images in a child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from runner_svc.environments.environment import EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES, PYTORCH_VARIABLES
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import EngineParameters, Number
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import Argument, DeviceSettings, MediaModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC
from weft_extensions.engines.environments import FOLDER

MAX_SEQUENCE_TOKENS = 512
ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "diffusers",
    summary="diffusers 0.42.1",
    variants={
        Variant.CPU: EnvironmentVariant(
            locks=("cpu-torch.lock", "cpu.lock"), installed_bytes=1_150_000_000, download_bytes=300_000_000
        ),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=5_500_000_000, download_bytes=2_700_000_000
        ),
    },
    check="import diffusers, PIL, torch, transformers; diffusers.StableDiffusionPipeline",
)


PARAMETERS = EngineParameters(
    engine="diffusers",
    # Arguments of the pipelines in version 0.42; each family supports some of them (families.py).
    allowed={
        "clip_skip": Number(0, 11, whole=True),
        "eta": Number(0, 1),
        "guidance_rescale": Number(0, 1),
        "max_sequence_length": Number(1, MAX_SEQUENCE_TOKENS, whole=True),
        "output_compression": Number(0, 100, whole=True),
    },
)


Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DeviceMap = Literal["none", "balanced"]
CpuOffload = Literal["none", "model", "sequential"]
Quantization = Literal["none", "bitsandbytes_4bit", "bitsandbytes_8bit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersModel(MediaModelSettings, DeviceSettings):
    """An image pipeline: a folder as written by diffusers' `save_pretrained`, with safetensors weights."""

    tried_by: ClassVar[str] = 'weft media image "a lighthouse" -o lighthouse.png'

    dtype: Annotated[Dtype, Argument("--dtype"), PUBLIC] = "auto"
    """Data type. Default: float32 on a processor; on an accelerator float16, and bfloat16 for sd3 and flux."""
    device_map: Annotated[DeviceMap, Argument("--device-map"), PUBLIC] = "none"
    """`balanced` distributes the pipeline's components over all devices of the runner. Not possible with
    `cpu_offload`."""
    cpu_offload: Annotated[CpuOffload, Argument("--cpu-offload"), PUBLIC] = "none"
    """Keeps parts of the pipeline in main memory while they are not in use. `model`: whole components; `sequential`:
    single layers, which needs the least device memory and is many times slower."""
    quantization: Annotated[Quantization, Argument("--quantization"), PUBLIC] = "none"
    """Quantization of the denoiser and the large text encoders when they are loaded; needs an accelerator."""


RUNTIME = Runtime(
    name="diffusers",
    summary="diffusers in a process that weft starts: images by Stable Diffusion and FLUX",
    docs="docs/engines.md",
    settings=DiffusersModel,
    build=deferred("weft_extensions.engines.diffusers.diffusers_backend:build"),
    formats=frozenset({WeightFormat.PIPELINE}),
    locations=EngineLocations(in_layers=False),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, *PYTORCH_VARIABLES, "DIFFUSERS_*"),
    load_values=lambda model: model.device_values,
    environment=ENVIRONMENT,
    advice={
        "operations": "the library's operations are fixed",
        "compute_type": "`dtype` is the type of the numbers",
        "embeddings": "a pipeline gives none",
    },
)
