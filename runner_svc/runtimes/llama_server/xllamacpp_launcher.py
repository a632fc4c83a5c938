"""llama.cpp's own HTTP server from the `xllamacpp` wheel, as a program that takes llama-server's flags.

    python -m runner_svc.runtimes.llama_server.xllamacpp_launcher --model FILE --port 0 --parallel 4 --ctx-size 8192

It needs no compiler and behaves as a llama-server: the same routes and answers, the key in LLAMA_API_KEY, and a line
with the address on which it listens.
"""

import argparse
import os
import signal
from pathlib import Path
from types import MappingProxyType
from typing import Any

FLASH_ATTENTION = MappingProxyType({"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"})
CACHE_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
SPECULATION = ("none", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
DRAFT_BY_MODEL = "draft-simple"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of llama-server that weft uses."""
    parser = argparse.ArgumentParser(prog="xllamacpp_server", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--alias", default="", help="name under /v1/models")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--parallel", type=int, default=1, help="slots")
    parser.add_argument(
        "--ctx-size", type=int, default=0, help="tokens over all slots; 0: the training context of the model"
    )
    parser.add_argument("--batch-size", "-b", type=int, default=2048, help="tokens per prefill step")
    parser.add_argument("--ubatch-size", "-ub", type=int, default=512, help="tokens that are computed in one batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-gpu-layers", "--gpu-layers", "-ngl", type=int, default=-1, help="-1: as many as fit")
    parser.add_argument("--split-mode", choices=["none", "layer", "row"], default="layer")
    parser.add_argument("--tensor-split", type=_parts, default=[], help="parts of the model for each device: 3,1")
    parser.add_argument("--flash-attn", "-fa", choices=list(FLASH_ATTENTION), default="auto")
    parser.add_argument("--cache-type-k", "-ctk", choices=CACHE_TYPES, default="f16", help="type of cached keys")
    parser.add_argument("--cache-type-v", "-ctv", choices=CACHE_TYPES, default="f16", help="type of cached values")
    parser.add_argument("--mmproj", "-mm", type=Path, help="multimodal projector, for images or audio")
    parser.add_argument("--model-draft", "-md", "--spec-draft-model", type=Path, help="model that drafts tokens")
    parser.add_argument("--image-max-tokens", type=int, default=-1, help="-1: from the model")
    kinds = (*SPECULATION, DRAFT_BY_MODEL)
    parser.add_argument("--spec-type", choices=kinds, default="none", help="speculative decoding")
    parser.add_argument("--spec-draft-n-max", type=int, help="draft tokens at a time")
    parser.add_argument(
        "--spec-draft-p-min", type=float, help="minimum probability of a draft token for drafting to continue"
    )
    parser.add_argument(
        "--spec-draft-ngl", "-ngld", type=int, default=-1, help="its layers on accelerators; -1: as many as fit"
    )
    parser.add_argument("--lora-scaled", type=_adapter, action="append", default=[], help="adapter as FILE:SCALE")
    cache_ram = int(os.environ.get("LLAMA_ARG_CACHE_RAM", "8192"))
    parser.add_argument("--cache-ram", type=int, default=cache_ram, help="MiB for prompts that no slot holds; 0: none")
    verbosity = int(os.environ.get("LLAMA_ARG_LOG_VERBOSITY", "3"))
    parser.add_argument("--log-verbosity", "-lv", type=int, default=verbosity, help="3: information, 4: more of it")
    parser.add_argument("--slot-save-path", type=Path, help="folder for saved slots; needed to erase one, too")
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--jinja", action="store_true")
    parser.add_argument("--chat-template-file", type=Path, help="use this template, not the model file's own")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--pooling", choices=["none", "mean", "cls", "last"], default="mean")
    parser.add_argument("--reranking", "--rerank", action="store_true", help="rank texts; for models made for it")
    return parser.parse_args(argv)


def _parts(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _adapter(text: str) -> tuple[str, float]:
    path, _, scale = text.partition(":")
    return path, float(scale)


def _set_load_options(params: Any, options: argparse.Namespace, library: Any) -> None:
    params.n_ubatch = options.ubatch_size
    params.flash_attn_type = library.llama_flash_attn_type[
        f"LLAMA_FLASH_ATTN_TYPE_{FLASH_ATTENTION[options.flash_attn]}"
    ]
    params.cache_type_k = library.ggml_type[f"GGML_TYPE_{options.cache_type_k.upper()}"]
    params.cache_type_v = library.ggml_type[f"GGML_TYPE_{options.cache_type_v.upper()}"]
    if options.mmproj is not None:
        params.mmproj.path = str(options.mmproj)
    if options.model_draft is not None:
        params.speculative.draft.mparams.path = str(options.model_draft)
    params.image_max_tokens = options.image_max_tokens
    adapters = []
    for path, scale in options.lora_scaled:
        adapter = library.CommonAdapterLoraInfo()
        adapter.path, adapter.scale = path, scale
        adapters.append(adapter)
    params.lora_adapters = adapters
    params.split_mode = library.llama_split_mode[f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}"]
    if options.tensor_split:
        places = len(params.tensor_split)
        if len(options.tensor_split) > places:
            raise SystemExit(f"--tensor-split: at most {places} parts")
        params.tensor_split = [*options.tensor_split, *[0.0] * (places - len(options.tensor_split))]
    if options.spec_type != "none":
        kind = options.spec_type.upper().replace("-", "_")
        params.load_mtp = options.spec_type == "draft-mtp"
        params.speculative.types = [library.common_speculative_type[f"COMMON_SPECULATIVE_TYPE_{kind}"]]
    if options.spec_draft_n_max is not None:
        params.speculative.draft.n_max = options.spec_draft_n_max
    if options.spec_draft_p_min is not None:
        params.speculative.draft.p_min = options.spec_draft_p_min
    params.speculative.draft.n_gpu_layers = options.spec_draft_ngl


def main() -> None:
    """Serves until a signal arrives."""
    options = parse_arguments()
    import xllamacpp  # noqa: PLC0415 - heavy, only loaded in this process

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.ctx_size
    params.n_batch = options.batch_size
    params.n_gpu_layers = options.n_gpu_layers
    _set_load_options(params, options, xllamacpp)
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.verbosity = options.log_verbosity
    params.endpoint_metrics = options.metrics
    params.endpoint_slots = options.slots
    params.endpoint_props = True
    params.cache_ram_mib = options.cache_ram
    params.cache_idle_slots = options.cache_ram != 0
    if options.slot_save_path is not None:
        # The library appends names without a separator.
        params.slot_save_path = f"{options.slot_save_path}{os.sep}"
    params.use_jinja = options.jinja
    if options.chat_template_file is not None:
        params.chat_template = options.chat_template_file.read_text(encoding="utf-8")
    if options.alias:
        params.model_alias = {options.alias}
    if key := os.environ.get("LLAMA_API_KEY"):
        params.api_keys = [key]
    if options.reranking:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    elif options.embeddings:
        params.embedding = True
        params.pooling_type = getattr(xllamacpp.llama_pooling_type, f"LLAMA_POOLING_TYPE_{options.pooling.upper()}")
    # Python's SIGINT handler would wait for native code to return; the default action aborts a load immediately.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)  # noqa: T201 - the line the supervisor waits for
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
