"""The server program of llama-cpp-python.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.llama_cpp_python.server --model FILE
"""

import argparse
import ctypes
import inspect
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft_extensions.engines.engine_host.http_server import (
    FAILED,
    TOO_LONG,
    UNSUPPORTED,
    Caller,
    LoadReports,
    RefusedError,
    Route,
    Turn,
    import_library,
    numbers,
    positive,
    program_parser,
    serve,
)
from weft_extensions.engines.engine_host.text_routes import (
    StopMatcher,
    TextEngine,
    Usage,
    check_prompt,
    logit_bias_of,
    sampling_of,
    schema_fault,
    send_choice,
    send_progress,
    send_usage,
    token_limit,
)

MEAN_POOLING = 1
"""llama.cpp's value for one vector per text; weft also sets this pooling for llama-server."""
LAYER_SPLIT = 1
"""llama.cpp's value for a split by whole layers."""
CACHE_TYPES = MappingProxyType({"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8})
"""ggml's values for the types of keys and values."""
_CONTROLLED = frozenset({"self", "tokens", "reset", "logits_processor", "stopping_criteria", "grammar"})


class LlamaCppEngine(TextEngine):
    """A loaded model, see Engine."""

    def __init__(self, library: Any, options: argparse.Namespace) -> None:
        self._library, self._bindings, self._can_embed = library, library.llama_cpp, options.embeddings
        self._saved = options.slot_save_path
        with _load_progress(self._bindings):
            self._llama = library.Llama(
                model_path=str(options.model),
                n_ctx=options.context_tokens,
                n_batch=options.batch_tokens,
                n_ubatch=options.batch_tokens,
                n_threads=options.threads,
                n_threads_batch=options.threads,
                n_gpu_layers=options.gpu_layers,
                embedding=options.embeddings,
                **load_settings(options),
            )
        # The output during a load explains failures; afterwards it would include lines for every request.
        self._llama.verbose = False
        logging.getLogger("llama-cpp-python").setLevel(logging.WARNING)
        self._native_eval, self._llama.eval = self._llama.eval, self._watched_eval
        self._caller: Caller | None = None
        self._usage, self._prompt_total = Usage(), 0
        self._counts_prefill = False
        # The library keeps no reference to the callback, which must live as long as the context. It aborts a prefill
        # within one node of the graph (on a GPU, one batch) if the caller disconnects.
        self._abort = self._bindings.ggml_abort_callback(lambda _: self._is_left())
        self._bindings.llama_set_abort_callback(self._llama.ctx, self._abort, None)
        self._vocabulary = self._bindings.llama_model_get_vocab(self._llama.model)
        self._known = frozenset(inspect.signature(self._llama.generate).parameters) - _CONTROLLED
        self.context_tokens = int(self._llama.n_ctx())

    def _is_left(self) -> bool:
        return self._caller is not None and self._caller.is_gone()

    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """See Engine.tokens_of: the vocabulary is only read."""
        tokens: list[int] = self._llama.tokenize(text.encode(), add_bos=add_special, special=True)
        return tokens

    def piece_of(self, token: int) -> bytes:
        """See Engine.piece_of."""
        piece: bytes = self._llama.detokenize([token])
        return piece

    def forget(self) -> int:
        """See Engine.forget."""
        count = int(self._llama.n_tokens)
        self._llama.reset()
        return count

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        saving = {f"/slots/0?action={act.__name__}": Route(act, Turn.ALL) for act in (self.save, self.restore)}
        return {**super().routes, **(saving if self._saved else {})}

    def props(self) -> dict[str, Any]:
        """See Engine.props."""
        return {**super().props(), "build_info": f"llama-cpp-python {self._library.__version__}"}

    def save(self, body: dict[str, Any], _: Caller) -> dict[str, Any]:
        """Writes the cached prompt, tokens and state, to a file."""
        count, size = int(self._llama.n_tokens), 0
        if count:
            tokens = (self._bindings.llama_token * count)(*self._llama.input_ids[:count])
            size = self._bindings.llama_state_seq_save_file(self._llama.ctx, self._file(body), 0, tokens, count)
            if not size:
                raise RefusedError("llama.cpp did not write its state", FAILED)
        return {"n_saved": count, "n_written": size}

    def restore(self, body: dict[str, Any], _: Caller) -> dict[str, Any]:
        """Replaces the cached prompt with the one in a file."""
        llama, tokens = self._llama, (self._bindings.llama_token * self.context_tokens)()
        llama.reset()
        count = ctypes.c_size_t()
        if not self._bindings.llama_state_seq_load_file(
            llama.ctx, self._file(body), 0, tokens, self.context_tokens, ctypes.byref(count)
        ):
            raise RefusedError("llama.cpp cannot read this state", FAILED)
        llama.input_ids[: count.value], llama.n_tokens = tokens[: count.value], count.value
        return {"n_restored": count.value}

    def _file(self, body: dict[str, Any]) -> bytes:
        return str(self._saved / body["filename"]).encode()

    def embed(self, texts: list[str], caller: Caller) -> dict[str, Any]:
        """See Engine.embed."""
        if not self._can_embed:
            raise RefusedError("this model is not configured for embeddings", UNSUPPORTED)
        limit = self._llama.n_batch
        for length in (len(self._llama.tokenize(text.encode())) for text in texts):
            if not length:
                raise RefusedError("a text to embed has no tokens")
            if length > limit:
                raise RefusedError(
                    f"a text has {length} tokens; this model embeds at most {limit} tokens per text", TOO_LONG
                )
        self._caller = caller
        self._output_embeddings(True)
        data, total = [], 0
        for index, text in enumerate(texts):
            caller.raise_if_gone()
            vectors, count = self._llama.embed([text], normalize=True, truncate=False, return_count=True)
            total += count
            data.append({"index": index, "embedding": [float(value) for value in vectors[0]]})
        return {"data": data, "usage": {"prompt_tokens": total, "total_tokens": total}}

    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """See Engine.complete."""
        prompts, usage = self.read_prompts(body)
        options, grammar = self._sampling(body), self._grammar(body)
        self._caller, self._usage = caller, usage
        self._output_embeddings(False)
        if body.get("cache_prompt") is False:
            self.forget()
        seed = random.SystemRandom().getrandbits(31) if body.get("seed") is None else body["seed"]
        count = body.get("n") or 1
        for index, tokens in enumerate(prompts):
            for number in range(count):
                choice = index * count + number
                self._llama.set_seed((seed + choice) % 2**32)
                # The choices of a prompt share its prefill, which is reported and counted for the first choice only.
                self._prompt_total, self._counts_prefill = len(tokens), number == 0
                if grammar:
                    # A grammar has state, so each choice needs a new one.
                    options["grammar"] = self._library.LlamaGrammar.from_string(grammar, verbose=False)
                self._one_choice(body, choice, tokens, options)
        send_usage(caller, usage)

    def _one_choice(self, body: dict[str, Any], choice: int, tokens: list[int], options: dict[str, Any]) -> None:
        """Streams a choice, and adds its figures to the usage."""
        limit = token_limit(body, len(tokens), self.context_tokens)
        assert self._caller is not None
        matcher, caller, usage = StopMatcher(body.get("stop") or ()), self._caller, self._usage
        began = time.perf_counter()
        # The last token of a cached prompt is evaluated again, which counts the others; a restored one has no logits.
        self._llama._requires_eval = True  # noqa: SLF001 - as the library's `load_state` does
        generation = self._llama.generate(tokens, **options)
        for count, token in enumerate(generation, start=1):
            caller.raise_if_gone()
            if count == 1:
                usage.prompt_seconds += time.perf_counter() - began
                began = time.perf_counter()
            usage.completion_tokens += 1
            ended = self._bindings.llama_vocab_is_eog(self._vocabulary, token)
            text = "" if ended else matcher.feed(self.piece_of(token))
            stopped = ended or matcher.stopped
            over = stopped or count >= limit
            reason = ("stop" if stopped else "length") if over else None
            send_choice(caller, choice, text + matcher.finish() if over else text, reason)
            if over:
                break
        generation.close()
        usage.decode_seconds += time.perf_counter() - began

    def _watched_eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens in reported steps. The library calls it for a prompt, then for every token."""
        llama, caller = self._llama, self._caller
        if caller is None or (len(tokens) == 1 and llama.n_tokens >= self._prompt_total):
            self._native_eval(tokens)
            return
        # The library evaluates only the uncached part of the prompt.
        cached = self._prompt_total - len(tokens)
        self._usage.cached_tokens += cached if self._counts_prefill else 0
        for begin in range(0, len(tokens), llama.n_batch):
            caller.raise_if_gone()
            self._native_eval(tokens[begin : begin + llama.n_batch])
            if self._counts_prefill:
                send_progress(caller, self._prompt_total, int(llama.n_tokens), cached)

    def prompt_of(self, prompt: str | list[int], *, add_special: bool) -> list[int]:
        """See TextEngine.prompt_of."""
        if isinstance(prompt, str):
            prompt = self.tokens_of(prompt, add_special=add_special) or [self._llama.token_bos()]
        check_prompt(prompt, self.context_tokens, self._llama.n_vocab())
        return prompt

    def _sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        options = sampling_of(body, self._known, "llama-cpp-python")
        if bias := logit_bias_of(body, self._llama.n_vocab()):

            def add_bias(_: Any, scores: Any) -> Any:
                for token, value in bias.items():
                    scores[token] += value
                return scores

            options["logits_processor"] = self._library.LogitsProcessorList([add_bias])
        return options

    def _grammar(self, body: dict[str, Any]) -> str:
        """Returns the grammar of the answer as GBNF; empty: none."""
        schema, grammar = body.get("json_schema") or "", body.get("grammar") or ""
        if not schema and not grammar:
            return ""
        name = "response_format" if schema else "grammar"
        if schema and (why := schema_fault(schema)):
            raise RefusedError(f"{name}: {why}")
        try:
            text: str = self._library.llama_grammar.json_schema_to_gbnf(schema) if schema else grammar
        except Exception as error:
            raise RefusedError(f"{name}: llama-cpp-python cannot follow this schema") from error
        # The library does not check whether llama.cpp accepted a grammar; a rejected one would end the process.
        parsed = self._bindings.llama_sampler_init_grammar(self._vocabulary, text.encode(), b"root")
        if not parsed:
            raise RefusedError(f"{name}: llama.cpp cannot parse this grammar")
        self._bindings.llama_sampler_free(parsed)
        return text

    def _output_embeddings(self, wanted: bool) -> None:
        if self._can_embed:
            self._bindings.llama_set_embeddings(self._llama.ctx, wanted)
            if wanted:
                self._llama.reset()


def load_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the library's arguments that differ from its defaults."""
    settings: dict[str, Any] = {"pooling_type": MEAN_POOLING} if options.embeddings else {}
    if options.flash_attention == "on":
        settings["flash_attn"] = True
    for name, kind in (("type_k", options.cache_type_k), ("type_v", options.cache_type_v)):
        if kind is not None:
            settings[name] = CACHE_TYPES[kind]
    if options.tensor_split:
        settings |= {"tensor_split": list(options.tensor_split), "split_mode": LAYER_SPLIT}
    return settings


@contextmanager
def _load_progress(bindings: Any) -> Iterator[None]:
    """Prints the loaded share during a load, for which the library has no argument."""
    make_defaults, reports = bindings.llama_model_default_params, LoadReports()

    def report(share: float, _: Any) -> bool:
        reports.report(share)
        return True

    callback = bindings.llama_progress_callback(report)

    def defaults() -> Any:
        parameters = make_defaults()
        parameters.progress_callback = callback
        return parameters

    bindings.llama_model_default_params = defaults
    try:
        yield
    finally:
        bindings.llama_model_default_params = make_defaults


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("llama_cpp_python_server", __doc__)
    parser.add_argument("--context-tokens", type=int, default=2048, help="0: the training context of the model")
    parser.add_argument("--gpu-layers", type=int, default=-1, help="-1: all, where the library was built for a GPU")
    parser.add_argument("--batch-tokens", type=positive, default=512, help="tokens per step of prefill")
    parser.add_argument("--flash-attention", choices=["on", "off"], default="off")
    parser.add_argument("--cache-type-k", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--cache-type-v", choices=list(CACHE_TYPES), help="default: f16")
    parser.add_argument("--tensor-split", type=numbers, default=(), help="parts of the model for each device: 3,1")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--slot-save-path", type=Path, help="folder for saved prompts; default: none are saved")
    return parser.parse_args(argv)


def main() -> None:
    """Loads the model and serves one request after the other."""
    serve(lambda options: LlamaCppEngine(import_library("llama_cpp"), options), parse_arguments())


if __name__ == "__main__":
    main()
