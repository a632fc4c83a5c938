"""Makes pipelines of every family with small random weights, for tests of the runtime diffusers.

Usage: make_tiny_pipelines.py <target folder>, under an interpreter that has diffusers. Each folder in it is a model:
its pictures are noise, and everything around them is real.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# Their modules here are stand-ins for tests; the interpreter of this program has the libraries themselves.
diffusers: Any = import_module("diffusers")
torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

MAX_TEXT_TOKENS = 77
TEXT_WIDTH = 32
BEGIN, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(work: Path) -> Any:
    """Returns a tokenizer whose tokens are bytes, inside and at the end of a word."""
    letters = sorted(byte_letters())
    vocabulary = {token: number for number, token in enumerate([*letters, *(f"{one}</w>" for one in letters)])}
    vocabulary |= {BEGIN: len(vocabulary), END: len(vocabulary) + 1}
    (work / "vocab.json").write_text(json.dumps(vocabulary))
    (work / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer.from_pretrained(work, model_max_length=MAX_TEXT_TOKENS)


def byte_letters() -> list[str]:
    """Returns the 256 letters that stand for bytes in byte-level vocabularies."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [*map(chr, shown), *(chr(256 + index) for index in range(len(hidden)))]


def text_encoder(*, projected: bool) -> Any:
    """Returns CLIP's encoder of texts."""
    config = transformers.CLIPTextConfig(
        vocab_size=514,
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_TEXT_TOKENS,
        projection_dim=TEXT_WIDTH,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return transformers.CLIPTextModelWithProjection(config) if projected else transformers.CLIPTextModel(config)


def t5() -> tuple[Any, Any]:
    """Returns T5's encoder of texts, and its tokenizer of letters."""
    letters = [(chr(sign), -2.0) for sign in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0), *letters]
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=MAX_TEXT_TOKENS)
    config = transformers.T5Config(
        vocab_size=128, d_model=TEXT_WIDTH, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5EncoderModel(config), tokenizer


def vae(latent_channels: int, scales: int, **settings: Any) -> Any:
    """Returns an autoencoder that makes an image smaller by 2 for each scale but the first."""
    return diffusers.AutoencoderKL(
        block_out_channels=[32, 64, 64, 64][:scales],
        in_channels=3,
        out_channels=3,
        down_block_types=["DownEncoderBlock2D"] * scales,
        up_block_types=["UpDecoderBlock2D"] * scales,
        latent_channels=latent_channels,
        sample_size=64,
        **settings,
    )


def unet(**settings: Any) -> Any:
    """Returns the denoiser of Stable Diffusion."""
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **settings,
    )


def stable_diffusion(tokenizer: Any) -> Any:
    """Returns a Stable Diffusion of the first generation."""
    return diffusers.StableDiffusionPipeline(
        unet=unet(cross_attention_dim=TEXT_WIDTH),
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False
        ),
        vae=vae(4, 2),
        text_encoder=text_encoder(projected=False),
        tokenizer=tokenizer,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_xl(tokenizer: Any) -> Any:
    """Returns a Stable Diffusion XL."""
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(
            cross_attention_dim=2 * TEXT_WIDTH,
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + TEXT_WIDTH,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            steps_offset=1,
            timestep_spacing="leading",
        ),
        vae=vae(4, 2),
        text_encoder=text_encoder(projected=False),
        text_encoder_2=text_encoder(projected=True),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
    )


def stable_diffusion_3(tokenizer: Any) -> Any:
    """Returns a Stable Diffusion 3, whose third encoder of texts is left out, as its own description allows."""
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=2 * TEXT_WIDTH,
            pooled_projection_dim=2 * TEXT_WIDTH,
            out_channels=16,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(16, 2, shift_factor=0.0609, scaling_factor=1.5305, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=text_encoder(projected=True),
        text_encoder_2=text_encoder(projected=True),
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=None,
    )


def flux(tokenizer: Any) -> Any:
    """Returns a FLUX."""
    encoder, second = t5()
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=[4, 4, 8],
            guidance_embeds=True,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=vae(16, 2, shift_factor=0.1159, scaling_factor=0.3611, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=text_encoder(projected=False),
        text_encoder_2=encoder,
        tokenizer=tokenizer,
        tokenizer_2=second,
    )


def main(target: Path) -> None:
    """Makes all of them."""
    work = target / "clip-tokenizer"
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = clip_tokenizer(work)
    families = {"sd": stable_diffusion, "sdxl": stable_diffusion_xl, "sd3": stable_diffusion_3, "flux": flux}
    for name, make in families.items():
        torch.manual_seed(1)
        make(tokenizer).save_pretrained(target / name, safe_serialization=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
