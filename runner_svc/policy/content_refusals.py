"""Whether a server that answers with an error refuses what is in the request, told from the words of its error.

A status alone does not say it: llama.cpp's server, Ollama and others answer 500 to an image that their model cannot
read, and so to every replica that the same request is sent to. Such an answer says nothing about the server.
"""

import re

from runner_svc.policy.out_of_memory import last_words

_CONTEXT = re.compile(
    r"""
    maximum\ context\ length               # OpenAI, vLLM, SGLang
    | exceeds?\ (the\ )?(available\ |maximum\ |model'?s\ )?context  # llama.cpp, llama-cpp-python, Ollama
    | longer\ than\ the\ (model|maximum|context)  # SGLang: "longer than the model's context length"
    | too\ large\ to\ process.*batch\ size # llama.cpp, a text to embed that is longer than a physical batch
    | too\ (big|long).*KV\ (size|cache)    # llama-box
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
    """Whether the error says that the request does not fit the context."""
    return _CONTEXT.search(words) is not None


def refuses_content(words: str) -> bool:
    """Whether the error says that the request holds what the model or the server cannot take.

    What sounds like it and speaks of memory that could not be had is a failure of the server.
    """
    return last_words([words]) is None and (_CONTENT.search(words) is not None or refuses_length(words))
