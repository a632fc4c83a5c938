"""Projectors with random weights, so that llama.cpp's server accepts images and recordings for the demo model.

The output is meaningless, but shows that a file gets from its caller into the prompt.
"""

from array import array
from math import prod
from pathlib import Path
from random import Random

from kit.gguf_bytes import Value, entry, gguf, padded, tensor

SMOLLM2_WIDTH = 576
IMAGE_TOKENS = 4
"""Two by two patches per image."""
_SIZE, _PATCH = 28, 14
_HIDDEN, _HEADS, _LAYERS, _FORWARD = 64, 2, 2, 128
_MEL_BINS, _FRAMES, _STACKED = 80, 1_500, 10
Shape = tuple[int, ...]


def write_vision_projector(path: Path) -> Path:
    """Writes a projector like LLaVA's: an image encoder of two layers, and two layers to the demo model's width."""
    entries: dict[str, Value] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": "mlp",
        "clip.vision.image_size": _SIZE,
        "clip.vision.patch_size": _PATCH,
        "clip.vision.image_mean": (0.5, 0.5, 0.5),
        "clip.vision.image_std": (0.5, 0.5, 0.5),
        **_encoder("vision"),
    }
    shapes: dict[str, Shape] = {
        "v.patch_embd.weight": (_PATCH, _PATCH, 3, _HIDDEN),
        "v.class_embd": (_HIDDEN,),
        "v.position_embd.weight": (_HIDDEN, (_SIZE // _PATCH) ** 2 + 1),
        **_linear("v.pre_ln", _HIDDEN),
        **_blocks("v"),
        **_linear("mm.0", SMOLLM2_WIDTH, _HIDDEN),
        **_linear("mm.2", SMOLLM2_WIDTH, SMOLLM2_WIDTH),
    }
    return _write(path, entries, shapes)


def write_audio_projector(path: Path) -> Path:
    """Writes a projector like Ultravox's: an audio encoder like Whisper's, and two layers to the model's width."""
    entries: dict[str, Value] = {
        "clip.has_audio_encoder": True,
        "clip.projector_type": "ultravox",
        "clip.audio.num_mel_bins": _MEL_BINS,
        "clip.audio.projector.stack_factor": _STACKED,
        **_encoder("audio"),
    }
    shapes: dict[str, Shape] = {
        "a.conv1d.1.weight": (3, _MEL_BINS, _HIDDEN),
        "a.conv1d.1.bias": (1, _HIDDEN),
        "a.conv1d.2.weight": (3, _HIDDEN, _HIDDEN),
        "a.conv1d.2.bias": (1, _HIDDEN),
        "a.position_embd.weight": (_HIDDEN, _FRAMES),
        **_linear("a.post_ln", _HIDDEN),
        # Whisper's keys have no bias.
        **{name: shape for name, shape in _blocks("a").items() if not name.endswith("attn_k.bias")},
        "mm.a.norm_pre.weight": (_HIDDEN * _STACKED,),
        "mm.a.mlp.1.weight": (_HIDDEN * _STACKED, 2 * _FORWARD),
        "mm.a.norm_mid.weight": (_FORWARD,),
        "mm.a.mlp.2.weight": (_FORWARD, SMOLLM2_WIDTH),
    }
    return _write(path, entries, shapes)


def _encoder(kind: str) -> dict[str, Value]:
    return {
        "clip.use_gelu": True,
        f"clip.{kind}.embedding_length": _HIDDEN,
        f"clip.{kind}.feed_forward_length": _FORWARD,
        f"clip.{kind}.projection_dim": SMOLLM2_WIDTH,
        f"clip.{kind}.block_count": _LAYERS,
        f"clip.{kind}.attention.head_count": _HEADS,
        f"clip.{kind}.attention.layer_norm_epsilon": 1e-5,
    }


def _blocks(prefix: str) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for layer in range(_LAYERS):
        block = f"{prefix}.blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            shapes |= _linear(f"{block}.{name}", _HIDDEN, _HIDDEN)
        shapes |= _linear(f"{block}.ln1", _HIDDEN) | _linear(f"{block}.ln2", _HIDDEN)
        shapes |= _linear(f"{block}.ffn_up", _FORWARD, _HIDDEN) | _linear(f"{block}.ffn_down", _HIDDEN, _FORWARD)
    return shapes


def _linear(name: str, out: int, *inputs: int) -> dict[str, Shape]:
    """Returns weight and bias; without inputs those of a norm."""
    return {f"{name}.weight": (*inputs, out), f"{name}.bias": (out,)}


def _write(path: Path, entries: dict[str, Value], shapes: dict[str, Shape]) -> Path:
    random, tensors, data = Random(7), [], b""
    for name, shape in shapes.items():
        tensors.append(tensor(name, shape, offset=len(data)))
        data += padded(array("f", (random.gauss(0.0, 0.05) for _ in range(prod(shape)))).tobytes())
    known = {"general.architecture": "clip", "general.type": "mmproj", **entries}
    path.write_bytes(gguf([entry(name, value) for name, value in known.items()], tensors, data=data))
    return path
