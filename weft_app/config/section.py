"""What every section of the configuration file has in common."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from weft.kernel.errors import FieldError
from weft.kernel.names import is_name
from weft.kernel.units import parse_rate


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError("must be letters, digits, '.', '_', ':' or '-', starting with a letter or digit")
    return text


def _rate(text: str) -> str:
    try:
        parse_rate(text, "rate")
    except FieldError as error:
        raise ValueError(error.message.removeprefix("rate: ")) from None
    return text


def _off_is_a_word(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


Name = Annotated[str, AfterValidator(_name)]
Seconds = Annotated[float, Field(gt=0, le=86_400 * 365)]
Port = Annotated[int, Field(ge=0, le=65_535)]
RateText = Annotated[str, AfterValidator(_rate)]
"""A rate such as `100req/min`."""
Repetition = Annotated[Literal["off", "warn", "kill"], BeforeValidator(_off_is_a_word)]
"""What happens to an answer that repeats itself over and over."""


class Section(BaseModel):
    """A mapping of the file: unknown names are refused, and nothing is converted."""

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
