"""`weft models quote`: when each place of the mesh would answer a chat request."""

from typing import Annotated, Any

import typer

from weft.kernel.values.units import dollars_words, time_words
from weft_app.cli.completion import complete_model
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, AllowRemoteOption, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import custom_columns, print_document, print_table


def _spread(quote: Document, name: str) -> str | None:
    known = quote.get(name)
    return None if known is None else f"{time_words(known['p50Seconds'])} to {time_words(known['p90Seconds'])}"


_COLUMNS = custom_columns(
    "MODEL:model RUNNER:runner HOST:host? WAIT FIRST_TOKEN COMPLETION TOKENS ENERGY PRICE REMOTE:remote "
    "MEASURED:measuredCount?",
    WAIT=lambda quote: time_words(quote["waitSeconds"]) if "waitSeconds" in quote else "unknown",
    FIRST_TOKEN=lambda quote: _spread(quote, "firstToken"),
    COMPLETION=lambda quote: _spread(quote, "completion"),
    ENERGY=lambda quote: f"{quote['energyMillijoules'] / 1e3:.3g} J" if "energyMillijoules" in quote else None,
    PRICE=lambda quote: dollars_words(quote["priceNanodollars"]) if "priceNanodollars" in quote else None,
    TOKENS=lambda quote: f"{quote.get('promptTokens', 0)} in, {quote['completionTokens']} out",
)


def quote(
    model: Annotated[str, typer.Argument(help="A model, pool, route or agent.", autocompletion=complete_model)],
    prompt: Annotated[str, typer.Argument(help="The prompt; its length matters, and how much of it is cached.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of the answer.")] = None,
    allow_remote: AllowRemoteOption = False,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Show when each place of the mesh would answer a prompt, without sending it.

    Half of such answers arrive within the first time, 90 % within the second. Energy and price are empty where no power
    was measured and no price is known.

    Example: weft models quote qwen3:0.6b "Write a haiku." --max-tokens 50
    """
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if allow_remote:
        body["allow_remote"] = True
    with connect(home) as api:
        answer = api.post("/v1/quotes", body)
    if output is OutputFormat.TABLE:
        print_table(answer["items"], _COLUMNS)
    else:
        print_document(answer, output)
