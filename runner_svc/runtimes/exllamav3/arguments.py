"""The command line of the server program of ExLlamaV3: from a model's settings and a load's order."""

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import context_parameter, whole_parameter, word_parameter
from runner_svc.runtimes.exllamav3.settings import FULL_BITS, PAGE_TOKENS, ExllamaV3Model, cache_bits, cache_tokens_of
from weft.kernel.load_parameters import LoadParameter

SERVER_PROGRAM = "runner_svc.runtimes.exllamav3.server"
QUANT_WORDS = (*map(str, range(2, 9)), str(FULL_BITS))


def server_arguments(model: ExllamaV3Model, order: LoadOrder, port: int) -> list[str]:
    """Returns the command line after the program."""
    given = order.parameters
    context = int(given.get("context_tokens", model.slot_context_tokens))
    keys, values = cache_bits(str(given["cache_quant"]) if "cache_quant" in given else model.cache_quant)
    wanted = int(given["cache_tokens"]) if "cache_tokens" in given else model.cache_tokens
    flags = [
        *("--port", str(port), "--model", str(order.model_path or model.file)),
        *("--context-tokens", str(context), "--slots", str(model.slots)),
        *("--cache-tokens", str(cache_tokens_of(wanted, context, model.slots))),
        *("--key-bits", str(keys), "--value-bits", str(values)),
        *("--tp-backend", model.tp_backend, "--chunk-tokens", str(model.chunk_tokens)),
        *("--step-tokens", str(model.step_tokens), "--requeue-tokens", str(model.requeue_tokens or 0)),
        *("--loop-tokens", str(model.loop_tokens), "--loop-repeats", str(model.loop_repeats)),
    ]
    if model.gpu_split:
        flags += ["--gpu-split", ",".join(f"{share:g}" for share in model.gpu_split)]
    if model.tensor_parallel:
        flags.append("--tensor-parallel")
    if model.shared_cache:
        flags.append("--shared-cache")
    return [*flags, *model.extra_arguments]


def load_parameters(model: ExllamaV3Model, trained_tokens: int) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model."""
    return (
        context_parameter(model.slot_context_tokens, trained_tokens),
        whole_parameter(
            "cache_tokens",
            "Tokens of the cache, for all requests together; a multiple of 256.",
            PAGE_TOKENS,
            16_777_216,
            model.cache_tokens,
        ),
        word_parameter("cache_quant", "Bits of keys and values in the cache.", QUANT_WORDS),
    )
