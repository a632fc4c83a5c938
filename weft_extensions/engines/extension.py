"""Engines that are libraries: text, speech, transcription and images in processes that weft starts."""

from weft.extension import Extension, RuntimeHook

EXTENSION = Extension(
    name="engines",
    summary="Engines that are libraries: CTranslate2, Diffusers, ExLlamaV3, faster-whisper, llama-cpp-python, piper.",
    docs="docs/engines.md",
    runtimes=tuple(
        RuntimeHook(name=name, place=f"weft_extensions.engines.{name}.runtime:RUNTIME")
        for name in ("ctranslate2", "diffusers", "exllamav3", "faster_whisper", "llama_cpp_python", "piper")
    ),
)
