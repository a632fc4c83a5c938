"""Finds causes of engine failures: out of memory, a build for another processor, a request the engine rejects."""

import re
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from pathlib import PurePath

LAST_LINES = 20
"""Number of last output lines that are searched: llama.cpp prints about ten after the relevant one."""
ADVICE = "a smaller context_tokens or fewer slots need less"

_WORDS = re.compile(
    r"""
    failed\ to\ allocate      # ggml-alloc.c, llama-kv-cache.cpp, llama-context.cpp: buffers of weights and cache
    | unable\ to\ allocate    # llama-model.cpp: "unable to allocate CUDA0 buffer"
    | cudaMalloc\ failed      # ggml-cuda.cu
    | out\ of\ memory         # CUDA, HIP and Metal; "CUDA out of memory" is PyTorch's
    | OutOfMemoryError        # PyTorch's exception, as vLLM prints it
    | No\ available\ memory\ for\ the\ cache\ blocks  # vLLM, when its cache does not fit
    | std::bad_alloc          # the C++ library
    | Cannot\ allocate\ memory  # ENOMEM in words
    | MemoryError             # Python
    """,
    re.IGNORECASE | re.VERBOSE,
)
_KILLED = "SIGKILL"
# ggml prints the same words when it only lacks page-locked memory, and continues.
_HARMLESS = re.compile(r"pinned memory|falling back", re.IGNORECASE)


def last_words(lines: Sequence[str]) -> str | None:
    """Returns the first of the last lines that reports a failed allocation; None: there is none."""
    return next((line for line in lines[-LAST_LINES:] if _WORDS.search(line) and not _HARMLESS.search(line)), None)


_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r"\s+File \".*\", line \d+")
_ESCAPED_BREAK = re.compile(re.escape(_TRACEBACK) + r"((?:\\{1,8}r)?\\{1,8}n)")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


def without_tracebacks(lines: Sequence[str]) -> list[str]:
    """Returns the non-empty lines, with each Python traceback replaced by its exception.

    A logger may prefix each line, and line breaks may be escaped. Frames without the start of their traceback are
    recognized only in the first lines.
    """
    kept: list[str] = []
    prefix, is_inside = "", False
    for line, after in pairwise((*lines, "")):
        if escaped := _ESCAPED_BREAK.search(line):
            parts = re.split(rf"(?<!\\){re.escape(escaped[1])}", line)
            if rest := without_tracebacks(parts):
                kept.append(escaped[1].join(rest))
            continue
        found = line.find(_TRACEBACK)
        if found >= 0:
            prefix, is_inside = line[:found], True
            if prefix.strip() and not after.startswith(prefix):
                kept.append(prefix.rstrip())
            continue
        text = line.removeprefix(prefix)
        is_inside = is_inside or (not kept and _FRAME.match(text) is not None)
        if not text.strip() or (is_inside and text.startswith((" ", "\t"))):
            continue
        is_inside = False
        if not text.startswith(_CHAINED):
            kept.append(text)
    return kept


class MemoryKill(Enum):
    """The memory that had run out when the kernel killed an engine. A value is the end of a sentence, and advice."""

    OWN_LIMIT = ("its memory limit was reached", ADVICE)
    SHARED_LIMIT = (
        "the memory limit of the container or service around weft was reached",
        f"raise that limit, or use less: {ADVICE}",
    )
    MACHINE = (
        "the whole machine ran out of memory",
        "stop other programs or unload other models; a limit of this model does not help",
    )
    UNKNOWN = ("the machine, or a memory limit around weft, ran out of memory", ADVICE)


def explain_out_of_memory(how: str, lines: Sequence[str], *, kill: MemoryKill | None) -> str | None:
    """Explains an exit by lack of memory, with advice; None: another cause.

    `kill`: the memory for which the kernel killed one of its processes. If it was killed for another reason, its output
    is not considered.
    """
    if kill is not None:
        cause, advice = kill.value
        return f"{how}: the kernel killed it because {cause}; {advice}"
    has_words = _KILLED not in how and last_words(lines) is not None
    return f"{how}: it ran out of memory; {ADVICE}" if has_words else None


_LOAD_CAUSES = (
    (r"(unknown|invalid|unrecognized) (command line )?(argument|option)", "it does not accept one of its arguments"),
    (r"address already in use|couldn't bind|failed to bind", "its port is in use"),
    (r"(unknown|unsupported) (model )?architecture", "it does not support the architecture of the model"),
    (r"(bad|invalid) magic|failed to (load|open|read) .{0,20}model", "it cannot read the model's file"),
    (r"no module named|importerror|cannot open shared object", "a library is missing"),
    (r"no cuda-capable device|driver version is insufficient|no accelerator", "it cannot use the accelerator"),
    (r"permission denied", "it lacks permission for a file"),
    (r"no such file", "a file is missing"),
)
"""Patterns in the lower-case output of engines that do not start, and the cause that each one shows."""


def load_cause(lines: Sequence[str]) -> str:
    """Returns why an engine did not start, as one of a fixed list of causes; empty: unknown.

    The output itself may quote prompts of earlier requests. Only readers of the engine's log may see it.
    """
    output = "\n".join(lines[-LAST_LINES:]).lower()
    return next((cause for pattern, cause in _LOAD_CAUSES if re.search(pattern, output)), "")


NATIVE_OFF = "-DGGML_NATIVE=OFF"
_ILLEGAL_INSTRUCTION = frozenset({"signal SIGILL", "exit code 132"})
"""Exit of the process itself, or of a shell around it (128 plus the signal number)."""
_SEGMENTATION_FAULT = frozenset({"signal SIGSEGV", "exit code 139"})
_CORE_DUMPED = " (core dumped)"


def explain_foreign_build(how: str, command: Sequence[str], *, has_answered: bool) -> str | None:
    """Explains an exit that is probably due to a build for another processor, with advice; None: another cause.

    `command`: the started command. `has_answered`: whether this process has answered a request. Unsupported or wrong
    kernels run with the first request at the latest, so a later segmentation fault has another cause; a later illegal
    instruction does not.
    """
    end = how.removesuffix(_CORE_DUMPED)
    if end not in _ILLEGAL_INSTRUCTION and (has_answered or end not in _SEGMENTATION_FAULT):
        return None
    when = "" if has_answered else " before its first answer"
    program = program_name(command)
    return f"{how}{when}: {program} was probably built for another processor; {_foreign_build_advice(program)}"


def program_name(command: Sequence[str]) -> str:
    """Returns the program of a command: the module if an interpreter runs one, else the file."""
    if len(command) > 2 and (command[1] == "-m" or PurePath(command[1]).match("engine_host/bootstrap.py")):
        return command[2]
    return PurePath(command[0]).name if command else "the engine"


def _foreign_build_advice(program: str) -> str:
    if program.endswith("xllamacpp_launcher"):
        return f"build llama-server on this machine or with {NATIVE_OFF}, and name it in the runner's `command`"
    if program.endswith("llama_cpp_python.server"):
        return f"reinstall llama-cpp-python with CMAKE_ARGS={NATIVE_OFF}"
    if program.endswith(".server"):
        return "install a version of the engine's library that was built for this processor"
    wheel = "python -m runner_svc.runtimes.llama_server.xllamacpp_launcher"
    return f"build it with {NATIVE_OFF}, or set the runner's `command` to the server of the xllamacpp wheel ({wheel})"


_CONTEXT = re.compile(
    r"""
    maximum\ context\ length               # OpenAI, vLLM, SGLang
    | exceeds?\ (the\ )?(available\ |maximum\ |model'?s\ )?context  # llama.cpp, llama-cpp-python, Ollama
    | longer\ than\ the\ (model|maximum|context)  # SGLang: "longer than the model's context length"
    | too\ large\ to\ process.{0,200}batch\ size  # llama.cpp, a text to embed that is longer than a physical batch
    | too\ (big|long).{0,200}KV\ (size|cache)  # llama-box
    | prompt\ is\ too\ long
    | max_new_tokens`?\ must\ be           # text-generation-inference: "`inputs` tokens + `max_new_tokens` must be <="
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_CONTENT = re.compile(
    r"""
    (image|audio|video|vision|multi-?modal)s?\ (input|data|content)?s?\ ?(is|are)\ not\ supported  # llama.cpp
    | provide\ the\ mmproj                 # llama.cpp, of images and audio
    | missing\ data\ required\ for\ (image|audio|vision)  # Ollama
    | (does\ not|doesn't)\ support\ (\w+\ )?(image|audio|video|vision|multi-?modal|tool|function|system|chat)
    | not\ a\ (multi-?modal|vision)\ model # vLLM
    | at\ most\ \d+\ (image|audio|video)   # vLLM: "At most 0 image(s) may be provided in one prompt"
    | (invalid|malformed)\ (image|audio)   # Ollama
    | (failed|unable)\ to\ (load|decode|parse|process|open)\ (the\ |an?\ )?(image|audio|base64)  # mtmd, vLLM
    | cannot\ identify\ image\ file        # Pillow, below vLLM, SGLang and diffusers
    | jinja                                # llama.cpp: "Jinja Exception: ..."; LM Studio: "with jinja template"
    | raise_exception | roles\ must\ alternate | template\ ?error  # chat templates of Llama, Mistral and Gemma
    | parser\ for\ this\ template          # llama.cpp: schemas and tools that its template parser cannot follow
    | requires\ --jinja                    # llama.cpp: tools without its template engine
    | (parse|initialize|initialise|invalid|compile|build)\ (the\ )?(grammar|samplers|json\ schema)  # xgrammar
    | json\ schema\ (error|conversion)     # llama.cpp
    | unsupported\ (content\[\]|message|role|tool)  # llama.cpp
    | (prompt|input)\ contains\ invalid    # llama.cpp: "Prompt contains invalid tokens"
    """,
    re.IGNORECASE | re.VERBOSE,
)


def refuses_length(words: str) -> bool:
    """Whether an error text says that the request does not fit the context.

    The status is not enough: for an image that their model cannot read, llama.cpp's server, Ollama and others answer
    500, which every replica would do and which says nothing about the server's health.
    """
    return _CONTEXT.search(words) is not None


def refuses_content(words: str) -> bool:
    """Whether an error text says that the model or the server does not support the content of the request.

    A text that also reports a failed allocation counts as a server failure.
    """
    return last_words([words]) is None and (_CONTENT.search(words) is not None or refuses_length(words))
