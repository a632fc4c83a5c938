"""The descriptor of the runtime `ngram`: what weft reads from the entry point `weft.runtimes`.

Keep this module cheap to import: weft imports it to read a configuration that names the runtime. What serves requests
is imported in `_build`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.runtime import Requirement, Runtime
from runner_svc.runtimes.settings import DEFAULT_CONTEXT_TOKENS, StartedModelSettings
from weft.kernel.request import Operation
from weft.kernel.settings import PathText

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramModel(StartedModelSettings):
    """A model of this runtime in weft.yaml: what weft lets every started model say, and these."""

    text: PathText
    """The text that it learns from; `~` is your home folder."""
    order: Annotated[int, Ge(1), Le(5)] = 2
    """Words that the next one depends on."""
    tokens_per_second: Annotated[float, Gt(0), Le(100_000)] = 200.0
    """How fast it writes."""

    @property
    def location(self) -> str:
        """The file."""
        return str(self.text)


PARAMETERS = EngineParameters(
    engine="the n-gram server",
    untaken=frozenset({"min_p", "top_k", "top_p", "repeat_penalty", "presence_penalty", "frequency_penalty"}),
)


def _build(model: NgramModel, context: "ModelContext") -> "ModelEngine":
    # Only a process that serves models needs these.
    from runner_svc.runtimes.model_engine import ModelEngine, parameter_profile  # noqa: PLC0415
    from weft_ngram.backend import SERVER, NgramBackend, NgramConfig  # noqa: PLC0415

    text = model.text.expanduser()
    if not text.is_file():
        raise context.refuse("text", f"there is no file {text}")
    config = NgramConfig(
        command=context.command or SERVER,
        alias=model.name,
        text=text,
        order=model.order,
        slots=model.slots,
        context_tokens=model.context_tokens or DEFAULT_CONTEXT_TOKENS,
        tokens_per_second=model.tokens_per_second,
        extra_arguments=model.extra_arguments,
        embeddings=False,
        parameters=parameter_profile(model, PARAMETERS),
        **context.process_settings(),
    )
    return ModelEngine(
        make_backend=lambda: NgramBackend(config),
        operations=frozenset({Operation.CHAT, Operation.COMPLETION}),
        slots=config.slots,
        context_tokens=config.context_tokens,
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
