"""A stand-in for the llama-cpp-python library, with the calls the engine host makes and none of the mathematics.

It is put on PYTHONPATH of the host program. Tokens are the bytes of the text plus 3; 0, 1 and 2 are unknown, beginning
and end. SCRIPTED_LLAMA holds switches as JSON.
"""
# ruff: noqa: ARG003, PLR0917 (the library's signatures)

import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_faults import misbehave_at_load

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_LLAMA", "{}"))
BOS, EOS, FIRST = 1, 2, 3
ABORTED = "llama_decode returned 2"

if SWITCHES.get("import_fails"):
    raise ImportError("libllama.so: cannot open shared object file")


for _name in SWITCHES.get("look_for", ()):
    _found = importlib.util.find_spec(_name)
    sys.stderr.write(f"{_name}: {'missing' if _found is None else 'found'}\n")


__version__ = SWITCHES.get("version", "0.3.36")


class _Bindings:
    """The module `llama_cpp.llama_cpp`."""

    llama_token = ctypes.c_int32

    def __init__(self) -> None:
        self.abort: Callable[[Any], bool] | None = None
        self.embeddings = True

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(progress_callback=None)

    def llama_progress_callback(self, function: Callable[[float, Any], bool]) -> Callable[[float, Any], bool]:
        return function

    def ggml_abort_callback(self, function: Callable[[Any], bool]) -> Callable[[Any], bool]:
        return function

    def llama_set_abort_callback(self, _context: object, callback: Callable[[Any], bool], _data: object) -> None:
        self.abort = callback

    def llama_model_get_vocab(self, model: object) -> object:
        return model

    def llama_vocab_is_eog(self, _vocabulary: object, token: int) -> bool:
        return token == EOS

    def llama_sampler_init_grammar(self, _vocabulary: object, grammar: bytes, root: bytes) -> object | None:
        return object() if grammar.startswith(root + b" ::=") else None

    def llama_sampler_free(self, sampler: object) -> None:
        assert sampler is not None

    def llama_set_embeddings(self, _context: object, wanted: bool) -> None:
        self.embeddings = wanted

    def llama_state_seq_save_file(self, context: "_Context", file: bytes, _: int, tokens: Any, count: int) -> int:
        assert list(tokens) == context.cells[:count], "the tokens are not those of the state"
        return 0 if SWITCHES.get("save_fails") else Path(file.decode()).write_bytes(json.dumps(list(tokens)).encode())

    def llama_state_seq_load_file(
        self, context: "_Context", file: bytes, _: int, tokens: Any, capacity: int, count: Any
    ) -> int:
        try:
            context.cells = json.loads(Path(file.decode()).read_bytes())
        except (OSError, ValueError):
            return 0
        assert len(context.cells) <= capacity
        tokens[: len(context.cells)] = context.cells
        count._obj.value = len(context.cells)
        return 1


class _Context:
    """A context of llama.cpp, with the tokens of its cells."""

    def __init__(self) -> None:
        self.cells: list[int] = []


llama_cpp = _Bindings()
LogitsProcessorList = list


class _Grammars:
    """The module `llama_cpp.llama_grammar`."""

    def json_schema_to_gbnf(self, schema: str) -> str:
        if "unsupported" in schema:
            raise ValueError("Unsupported schema")
        return "root ::= schema"


llama_grammar = _Grammars()


class LlamaGrammar:
    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> "LlamaGrammar":
        assert grammar.startswith("root ::="), "a grammar that llama.cpp refuses would end the process"
        return cls()


class Llama:
    def __init__(self, *, model_path: str, n_ctx: int, n_batch: int, embedding: bool, **options: Any) -> None:
        misbehave_at_load(SWITCHES)
        progress = llama_cpp.llama_model_default_params().progress_callback
        for step in range(5):
            progress(step / 4, None)
            time.sleep(SWITCHES.get("load_step_seconds", 0.0))
        self.n_batch = n_batch
        self.ctx, self.model = _Context(), object()
        self.n_tokens = 0
        self.input_ids = [0] * n_ctx
        self._requires_eval = True
        self.verbose = True
        self._context = n_ctx
        self._can_embed = embedding
        self._options = {"model_path": model_path, **options}

    def n_ctx(self) -> int:
        return self._context

    def n_vocab(self) -> int:
        return FIRST + 256

    def token_bos(self) -> int:
        return BOS

    def set_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**32

    def reset(self) -> None:
        self.n_tokens = 0
        self._requires_eval = True

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        tokens = [BOS] if add_bos else []
        pieces = text.split(b"<s>") if special else [text]
        for number, piece in enumerate(pieces):
            tokens += ([BOS] if number else []) + [FIRST + byte for byte in piece]
        return tokens

    def detokenize(self, tokens: list[int]) -> bytes:
        return bytes(token - FIRST for token in tokens if token >= FIRST)

    def eval(self, tokens: Sequence[int]) -> None:
        assert len(tokens) <= self.n_batch
        deadline = time.monotonic() + len(tokens) * SWITCHES.get("prefill_seconds_per_token", 0.0)
        while time.monotonic() < deadline:
            if llama_cpp.abort is not None and llama_cpp.abort(None):
                raise RuntimeError(ABORTED)
            time.sleep(0.001)
        if SWITCHES.get("decode_fails"):
            raise RuntimeError("llama_decode returned -3")
        self.ctx.cells[self.n_tokens :] = tokens
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        self._requires_eval = False

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Iterator[int]:
        assert not llama_cpp.embeddings or not self._can_embed, "logits were not asked for"
        prompt = list(tokens)
        common = 0
        while common < min(self.n_tokens, len(prompt)) and self.input_ids[common] == prompt[common]:
            common += 1
        if common == len(prompt) and (self._requires_eval or common < self.n_tokens):
            common -= 1
        self.n_tokens = common
        if prompt[common:]:
            self.eval(prompt[common:])
        assert not self._requires_eval, "there are no logits"
        answer = SWITCHES.get("answer", "The sea is calm and blue today.")
        if SWITCHES.get("echo_prompt"):
            answer = bytes(token - FIRST for token in prompt if token >= FIRST).decode()
        if SWITCHES.get("echo_sampling"):
            answer = json.dumps({"temp": temp, "top_k": top_k, "typical_p": typical_p, "grammar": grammar is not None})
        codes = [FIRST + byte for byte in answer.encode()] + [EOS]
        while True:
            for code in codes if not SWITCHES.get("endless") else codes[:-1]:
                time.sleep(SWITCHES.get("seconds_per_token", 0.0))
                yield code
                self.eval([code])

    def embed(
        self, texts: list[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> tuple[list[list[float]], int]:
        assert llama_cpp.embeddings, "embeddings were not asked for"
        assert normalize
        assert not truncate
        vectors, count = [], 0
        for text in texts:
            raw = text.encode()
            count += len(raw) + 1
            vectors.append([raw.count(letter) / max(len(raw), 1) for letter in b"aeiou tsc"])
        return vectors, count
