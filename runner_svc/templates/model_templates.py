"""The chat templates that a model will be used with, and the look at them before it is loaded."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from runner_svc.model_files.gguf import MAX_TEXT_BYTES, GgufHeader, is_gguf, read_gguf_header
from runner_svc.templates.sandbox import TemplateSandbox
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

TOOL_USE = "tool_use"
"""Name of the template that model files may have beside the usual one, for requests with tools."""
_SAMPLE = {
    "messages": [
        {"role": "system", "content": "You are helpful."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello, how can I help?"},
        {"role": "user", "content": "Count to three."},
    ],
    "add_generation_prompt": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTemplates:
    """How conversations become prompts for one model."""

    usual: str | None = None
    """None: there is no template, and so no chat."""
    tool_use: str | None = None
    """For requests with tools; None: the usual one."""
    bos_token: str = ""
    eos_token: str = ""
    others: tuple[str, ...] = ()
    """What else the file has: not used by weft, but an engine may."""

    @property
    def all(self) -> tuple[str, ...]:
        """Every template that an engine may choose; none: the file has none."""
        found = (self.usual, self.tool_use, *self.others)
        return tuple(template for template in found if template is not None)

    def pick(self, has_tools: bool) -> str | None:
        """The template for a request."""
        return self.tool_use if has_tools and self.tool_use is not None else self.usual


async def read_templates(model_path: Path, override: Path | None) -> ModelTemplates:
    """The templates of a model file, or the one in `override` instead of them.

    Raises INVALID_ARGUMENT for a file that says it is GGUF and is not, or for an override that is no text or over
    MAX_TEXT_BYTES; CONNECT_FAILED for a file that cannot be read. A file of another kind has no templates: whether it
    is of any use is for the engine to say.
    """
    try:
        return await asyncio.to_thread(_read, model_path, override)
    except OSError as error:
        raise WeftError(Reason.CONNECT_FAILED, f"the model's files cannot be read: {error.strerror}") from error


def _read(model_path: Path, override: Path | None) -> ModelTemplates:
    header = read_gguf_header(model_path) if is_gguf(model_path) else GgufHeader()
    if override is not None:
        return ModelTemplates(usual=_text(override), bos_token=header.bos_token, eos_token=header.eos_token)
    named = dict(header.named_templates)
    return ModelTemplates(
        usual=header.chat_template,
        tool_use=named.pop(TOOL_USE, None),
        bos_token=header.bos_token,
        eos_token=header.eos_token,
        others=tuple(named.values()),
    )


def _text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_BYTES + 1)
    if len(raw) > MAX_TEXT_BYTES:
        raise WeftError(Reason.INVALID_ARGUMENT, f"the file in chat_template_path is over {MAX_TEXT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise WeftError(Reason.INVALID_ARGUMENT, "the file in chat_template_path is not UTF-8 text") from None


async def check_templates(templates: ModelTemplates, sandbox: TemplateSandbox) -> None:
    """Render each template once with a small conversation, before an engine that has no sandbox is given it.

    Raises TEMPLATE_FAILED for one that oversteps the sandbox's limits. One that merely dislikes the sample is fine.
    """
    tokens = {"bos_token": templates.bos_token, "eos_token": templates.eos_token}
    for template in templates.all:
        await sandbox.check(template, {**_SAMPLE, **tokens})


async def check_before_load(model_path: Path, override: Path | None) -> ModelTemplates:
    """Look at the templates of a model whose engine renders them itself, and return them; 0.15 s.

    Raises as the two functions above, but for a model file that cannot be read: the engine says so better.
    """
    try:
        templates = await read_templates(model_path, override)
    except WeftError as error:
        if error.reason is Reason.CONNECT_FAILED and override is None:
            return ModelTemplates()
        raise
    if templates.all:
        async with TemplateSandbox() as sandbox:
            await check_templates(templates, sandbox)
    return templates
