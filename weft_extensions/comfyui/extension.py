"""ComfyUI as a kind of engine: image workflows."""

from weft.extension import Extension, RuntimeHook

EXTENSION = Extension(
    name="comfyui",
    summary="Image workflows in ComfyUI, running or started by weft.",
    docs="docs/media.md",
    requires=("media",),
    runtimes=(RuntimeHook(name="comfyui", place="weft_extensions.comfyui.runtime:RUNTIME"),),
)
