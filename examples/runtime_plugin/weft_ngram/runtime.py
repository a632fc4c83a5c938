"""The descriptor of the runtime `ngram`: what weft reads from the entry point `weft.runtimes`.

Keep this module cheap to import: weft imports it to read a configuration that names the runtime. What serves requests
is imported in `_build`.
"""

from typing import TYPE_CHECKING

from runner_svc.runtimes.runtime import Requirement, Runtime
from weft.kernel.request import Operation
from weft_ngram.parameters import PARAMETERS
from weft_ngram.settings import NgramModel

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


def _build(model: NgramModel, context: "ModelContext") -> "ModelEngine":
    # Only a process that serves models needs these.
    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from weft_ngram.backend import NgramBackend  # noqa: PLC0415

    text = model.text.expanduser()
    if not text.is_file():
        raise context.refuse("text", f"there is no file {text}")
    return ModelEngine(
        make_backend=lambda: NgramBackend(model, context),
        operations=frozenset({Operation.CHAT, Operation.COMPLETION}),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        model_path=text,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )


def _find_aiohttp(_: tuple[str, ...] | None) -> str:
    import aiohttp  # noqa: PLC0415 - asked by `weft doctor` alone

    return f"aiohttp {aiohttp.__version__}"


RUNTIME = Runtime(
    name="ngram",
    summary="word n-grams of a text file, in a server that weft starts",
    docs="https://example.com/weft-ngram",
    settings=NgramModel,
    build=_build,
    parameters=PARAMETERS,
    requirement=Requirement(name="n-gram server", find=_find_aiohttp, remedy="pip install aiohttp"),
    advice={"path": "this runtime learns from a text file: set text"},
)
