"""The option that a refusal of a load names, whether the command, the registry or the runner refuses it."""

import pytest

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli.verbs import naming_options


@pytest.mark.parametrize(
    ("field", "typed", "option"),
    [
        ("options.parameters.context_tokens", [], "--ctx"),
        ("options.parameters.context_tokens", ["context_tokens=9"], "--set context_tokens"),
        ("options.parameters.foo", ["foo=1"], "--set foo"),
        ("options.quantization", [], "--quantization"),
        ("options.keep_alive", [], "--keep-alive"),
        ("action.load_model.options.memory_budget_mb", [], "--budget"),
        ("action.load_model.evict_model", [], "--evict"),
        ("action.load_model.model", [], "MODEL"),
    ],
)
def test_load_error_names_the_typed_flag_instead_of_the_field(field: str, typed: list[str], option: str) -> None:
    refused = WeftError(Reason.INVALID_ARGUMENT, f"{field}: must be from 16 to 8192", metadata={"field": field})
    with pytest.raises(FieldError) as named, naming_options(typed):
        raise refused
    assert named.value.message == f"{option}: must be from 16 to 8192"


def test_error_without_a_leading_field_is_unchanged() -> None:
    refused = WeftError(Reason.MODEL_NOT_FOUND, "there is no model x", metadata={"field": "model"})
    with pytest.raises(WeftError) as kept, naming_options():
        raise refused
    assert kept.value is refused
