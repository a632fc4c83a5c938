"""The name of the model of a task, which may be one that does not exist yet."""

from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.cli import chat


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("there is no model qwn; did you mean qwen?", "did you mean qwen? use --wait-for-model"),
        ("there is no model qwn; there is llama", "there is llama; use --wait-for-model"),
    ],
)
def test_flag_for_a_future_model_is_suggested_only_for_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, said: str, shown: str
) -> None:
    def resolve(*_: object) -> None:
        raise WeftError(Reason.MODEL_NOT_FOUND, said)

    monkeypatch.setattr(chat, "resolve", resolve)
    with pytest.raises(WeftError) as caught:
        chat.name_for_task("qwn", Path("none"), wait_for_model=False)
    assert shown in caught.value.message
    assert chat.name_for_task("qwn", Path("none"), wait_for_model=True) == "qwn"
