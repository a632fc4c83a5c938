"""Arguments of calls as JSON objects."""

from gateway.answers.answer_builder import CalledTool
from gateway.answers.call_arguments import arguments_object


def test_arguments_with_line_breaks_stay_on_one_line_and_keep_all_digits() -> None:
    """Ollama's streams have one event per line."""
    written = '{\n  "far": 12345678901234567890123.50,\n  "text": "a\\nb"\n}'
    call = CalledTool(id="call_1", name="f", pieces=[written])
    found = arguments_object(call, is_cut=False)
    assert found is not None
    assert bytes(found) == b'{"far":12345678901234567890123.50,"text":"a\\nb"}'
