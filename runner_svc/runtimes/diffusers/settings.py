"""The settings of a model of diffusers in `weft.yaml`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from runner_svc.runtimes.settings import MediaModelSettings
from weft.kernel.settings import PUBLIC, Pattern

Device = Literal["cpu", "cuda", "auto"]
FamilyName = Literal["auto", "sd", "sdxl", "sd3", "flux"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DeviceMap = Literal["none", "balanced"]
CpuOffload = Literal["none", "model", "sequential"]
Quantization = Literal["none", "bitsandbytes_4bit", "bitsandbytes_8bit"]
Variant = Annotated[str, Pattern(r"^[A-Za-z0-9_]{1,32}$")]
MAX_STEPS = 1000
MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusersModel(MediaModelSettings):
    """A pipeline that makes images: the folder that `save_pretrained` of diffusers writes, weights as safetensors."""

    tried_by: ClassVar[str] = 'weft image "a lighthouse" -o lighthouse.png'

    family: Annotated[FamilyName, PUBLIC] = "auto"
    """Family of pipelines: Stable Diffusion 1 and 2, XL, 3 and 3.5, FLUX. Default: as `model_index.json` says; another
    one is refused."""
    device: Annotated[Device, PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""
    dtype: Annotated[Dtype, PUBLIC] = "auto"
    """Type of the numbers. Default: float32 on a processor; on an accelerator float16, for sd3 and flux bfloat16."""
    weights_variant: Annotated[Variant, PUBLIC] | None = None
    """Variant of the weights, such as `fp16`. Default: the usual weights, else the variant that the folder has."""
    device_map: Annotated[DeviceMap, PUBLIC] = "none"
    """`balanced` puts its components on all devices that it may use. Not with `cpu_offload`."""
    cpu_offload: Annotated[CpuOffload, PUBLIC] = "none"
    """Keeps in the machine's memory what does not compute: `model` whole components, `sequential` single layers, which
    needs the least memory of a device and is many times slower."""
    quantization: Annotated[Quantization, PUBLIC] = "none"
    """Quantizes the denoiser and the large encoders of text as they are loaded, on an accelerator."""
    vae_tiling: Annotated[bool, PUBLIC] = False
    """Decodes an image in tiles: less memory for large sizes, some time more."""
    attention_slicing: Annotated[bool, PUBLIC] = False
    """Computes attention in slices: less memory, more time."""
    safety_checker: Annotated[bool, PUBLIC] = True
    """Whether the safety checker of a model that has one is loaded; a request whose image it withholds is refused."""
    default_steps: Annotated[int, Ge(1), Le(MAX_STEPS), PUBLIC] | None = None
    """Steps of a request that names none. Default: 30 for sd and sdxl, 28 for sd3 and flux."""
    default_guidance: Annotated[float, Ge(0), Le(100), PUBLIC] | None = None
    """Guidance of a request that names none. Default: 7.5 for sd, 5 for sdxl, 4.5 for sd3, 3.5 for flux."""
    default_strength: Annotated[float, Gt(0), Le(1), PUBLIC] | None = None
    """How much of a source image is changed where a request does not say. Default: 0.8, for sdxl 0.6; with a mask 1,
    for sdxl 0.99."""
    max_steps: Annotated[int, Ge(1), Le(MAX_STEPS), PUBLIC] = 150
    """Most steps that a request may ask for."""
    size_multiple: Annotated[int, Ge(1), Le(1024), PUBLIC] | None = None
    """Width and height of an image are multiples of it. Default: 8 for sd and sdxl, 16 for sd3 and flux."""
    max_pixels: Annotated[int, Ge(64), Le(268_435_456), PUBLIC] = 4_194_304
    """Most pixels of an image that is made."""
    max_source_mb: Annotated[int, Ge(1), Le(1024)] = 32
    """Most MiB of a file that a request brings."""
    max_source_pixels: Annotated[int, Ge(64), Le(268_435_456)] = 33_554_432
    """Most pixels of an image that a request brings; it is checked before the pixels are decoded."""
    preview_side_pixels: Annotated[int, Ge(16), Le(2048)] = 384
    """Longer side of previews; the image is decoded at this size for each."""

    @property
    def max_source_bytes(self) -> int:
        """Most bytes of a file that a request brings."""
        return self.max_source_mb * MEBIBYTE
