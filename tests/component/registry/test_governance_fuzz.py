"""Tokens that were changed at random: none passes as another one, and nothing but a refusal comes of them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from governance_stage import Stage, canonical, compact, load, with_code
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from registry_svc.operations.policy.governance import Refused

MUTATIONS = 10 * settings().max_examples
SEED = 20_261_120
FIELDS = {"operation": "model-load", "modelId": "qwen", "maxContextLength": 8192}
ACTION = load(context_tokens=8192)
_SNIPPETS = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\\",
    "null",
    "true",
    "1e5",
    ".",
    "=",
    "-",
    "\u0000",
    "é",
    "\ud800",
    " ",
]


def _with_code(stage: Stage) -> str:
    return with_code(stage.op_token(FIELDS))


def _compact(stage: Stage) -> str:
    return compact(canonical(stage.op_token(FIELDS)))


def _mutated(text: str, chance: random.Random) -> str:
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        index = chance.randrange(len(text) + 1)
        end = min(len(text), index + chance.choice([0, 1, 1, 2, 20]))
        filling = chance.choice(["", chance.choice(_SNIPPETS), chr(chance.randrange(32, 127)), text[index : end + 9]])
        text = text[:index] + filling + text[end:]
    return text


@pytest.mark.parametrize("make", [_with_code, _compact], ids=["code", "compact"])
def test_modified_token_is_rejected_unless_equivalent(make: Callable[[Stage], str]) -> None:
    """A space between two names makes no other token; its nonce is the same, so it is good once with the first."""
    stage, chance = Stage(), random.Random(SEED)
    good = make(stage)
    first = stage.admit(ACTION, good)
    refused = 0
    for _ in range(MUTATIONS):
        changed = _mutated(good, chance)
        try:
            again = stage.admit(ACTION, changed)
        except Refused:
            refused += 1
        else:
            assert (again.nonce, again.signers, again.issued_at) == (first.nonce, first.signers, first.issued_at)
    assert refused > MUTATIONS * 0.8


def test_arbitrary_text_is_rejected() -> None:
    stage = Stage()

    @example("")
    @example("{}")
    @example('{"\ud800')
    @example("....")
    @example("[" * 16_000)
    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.one_of(st.text(max_size=200), st.from_regex(r"[A-Za-z0-9_-]{2,40}\.[A-Za-z0-9_-]{2,40}\.[A-Za-z0-9_-]*")))
    def refuses(text: str) -> None:
        with pytest.raises(Refused):
            stage.admit(ACTION, text)

    refuses()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_NAMES = ["operation", "modelId", "maxContextLength", "nonce", "opToken", "signers", "issuedAt"]


def test_correctly_signed_garbage_is_rejected() -> None:
    """Signers can be careless or hostile: what they sign is no more trusted in form than what anybody sends."""
    stage = Stage()

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(_NAMES), _JSON)
    def refuses(name: str, value: object) -> None:
        # A text may be a good nonce, and null is as nothing.
        changed = [] if value is None or (name == "nonce" and isinstance(value, str)) else value
        with pytest.raises(Refused):
            stage.admit(ACTION, with_code({**stage.op_token(FIELDS), name: changed}))
        with pytest.raises(Refused):
            stage.admit(ACTION, with_code(stage.op_token({**FIELDS, f"{name}x": changed})))

    refuses()


def test_arbitrary_headers_are_rejected() -> None:
    """Under a good code: what is in a header must not choose anything, nor stop anything."""
    stage = Stage()
    payload = canonical(stage.op_token(FIELDS))

    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(st.sampled_from(["alg", "kid", "crit", "b64", "jwk", "x5c", "zip", "enc"]), _JSON)
    def refuses(name: str, value: object) -> None:
        if (name, value) == ("alg", "HS256"):
            return
        header: dict[str, Any] = {name: value}
        with pytest.raises(Refused):
            stage.admit(ACTION, compact(payload, **header))

    refuses()
