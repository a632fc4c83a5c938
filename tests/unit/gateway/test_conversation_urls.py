"""Which URLs the gateway may fetch for a model: those that others named, in the form in which they are fetched."""

import pytest

from gateway.server_tools.pages import appears, canonical_url, named_texts
from weft.api.common.v1 import chat_pb2
from weft.dispatch.history import SUMMARY_HEAD


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://a.example", "https://a.example/"),
        ("HTTPS://A.Example:443/b?c=d#e", "https://a.example/b?c=d"),
        ("http://a.example:80/", "http://a.example/"),
        ("https://a.example/K\xe4se (1)", "https://a.example/K%C3%A4se%20(1)"),
        ("https://a.example:8443/", ""),
        ("https://a.example:80/", ""),
        ("https://user@a.example/", ""),
        ("https://user:pw@a.example/", ""),
        ("https://a.example\\@b.example/", ""),
        ("https://127.0.0.1/", ""),
        ("https://[::ffff:127.0.0.1]/", ""),
        ("https://0x7f.1/", ""),
        ("https://2130706433/", ""),
        ("https://localhost/", ""),
        ("https://[::1", ""),
        ("ftp://a.example/", ""),
        ("file:///etc/passwd", ""),
        ("javascript:alert(1)", ""),
        ("//a.example/", ""),
        ("a.example", ""),
        ("", ""),
    ],
)
def test_url_is_fetched_in_one_form_and_only_of_a_host_name_without_user_and_port(text: str, url: str) -> None:
    assert canonical_url(text) == url


@pytest.mark.parametrize(
    "text",
    [
        "Read https://a.example/b?c=d, please.",
        "(https://a.example/b?c=d)",
        "[here](https://A.example/b?c=d#part).",
        '{"url":"https://a.example/b?c=d"}',
        '<a href="https://a.example/b?c=d">',
        "\u8aad\u3080https://a.example/b?c=d\u3002\u6b21\u3078",
        "**https://a.example/b?c=d**",
        "no: https://a.example/ but https://a.example/b?c=d",
    ],
)
def test_url_in_a_text_is_found_without_the_punctuation_around_it(text: str) -> None:
    assert appears("https://a.example/b?c=d", [text])


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example/b",
        "https://a.example/b?c=de",
        "https://a.example/b?c=d&e=f",
        "http://a.example/b?c=d",
        "https://b.example/https://a.example/b?c=d",
        "a.example/b?c=d",
        "https://a.example/b?c=",
        "https://a.example/b?c=D",
    ],
)
def test_url_that_differs_in_any_part_is_another(text: str) -> None:
    assert not appears("https://a.example/b?c=d", [text])


def test_parentheses_belong_to_a_url_that_has_them() -> None:
    assert appears("https://a.example/Weft_(film)", ["See https://a.example/Weft_(film)."])


def test_texts_of_the_model_and_its_summaries_name_no_url() -> None:
    chat = chat_pb2.ChatPayload()
    for role, text in (
        (chat_pb2.ROLE_SYSTEM, "system"),
        (chat_pb2.ROLE_USER, "user"),
        (chat_pb2.ROLE_ASSISTANT, "model"),
        (chat_pb2.ROLE_USER, f"{SUMMARY_HEAD}summary"),
        (chat_pb2.ROLE_TOOL, "result"),
    ):
        chat.messages.add(role=role).content.add(text=text)
    assert list(named_texts(chat)) == ["system", "user", "result"]


def test_search_for_a_url_in_a_long_conversation_ends() -> None:
    texts = ["https://a.example/" + "." * 5_000_000, "https://a.example/b " * 200_000]
    assert not appears("https://a.example/c", texts)
