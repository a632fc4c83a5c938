"""Previews during generation: scaled-down latents decoded by the pipeline's decoder."""

from dataclasses import dataclass
from typing import Any

from runner_svc.runtimes.diffusers.pipelines import Pipelines


def preview_steps(step_count: int, preview_count: int) -> list[int]:
    """Returns the steps, counted from 1, that are followed by a preview: evenly spaced, without the last step."""
    wanted = {round(number * step_count / (preview_count + 1)) for number in range(1, preview_count + 1)}
    return sorted(step for step in wanted if 0 < step < step_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewDecoder:
    """Decodes previews with a longer side of at most `side_pixels`."""

    pipelines: Pipelines
    side_pixels: int

    def preview(self, pipeline: Any, latents: Any, width: int, height: int) -> Any:
        """Returns an approximate image of the latents. It costs as much as decoding a small image."""
        vae = pipeline.vae
        if self.pipelines.family.packs_latents:
            latents = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)  # noqa: SLF001 - no public API
        latents = self._shrunk(latents, pipeline.vae_scale_factor)
        restore = vae.dtype if _overflows(vae) else None
        if restore is not None:
            vae.to(latents.dtype)
        try:
            latents = latents.to(vae.dtype) / vae.config.scaling_factor
            latents = latents + (getattr(vae.config, "shift_factor", None) or 0.0)
            decoded = vae.decode(latents, return_dict=False)[0]
        finally:
            if restore is not None:
                vae.to(restore)
        return pipeline.image_processor.postprocess(decoded, output_type="pil")[0]

    def _shrunk(self, latents: Any, scale: int) -> Any:
        height, width = latents.shape[-2:]
        most = max(1, self.side_pixels // scale)
        share = min(1.0, most / max(height, width))
        return self.pipelines.shrunk(latents, max(1, round(height * share)), max(1, round(width * share)))


def _overflows(vae: Any) -> bool:
    """Whether the decoder exceeds the range of 16-bit floats."""
    return bool(getattr(vae.config, "force_upcast", False)) and str(vae.dtype) == "torch.float16"
