"""Grammars and patterns that make an engine follow exponentially many ways at once."""

import pytest

from weft.kernel.schemas.grammar_ambiguity import MAX_WAYS, grammar_ways, pattern_ways


def _chain(body: str, last: str, length: int = 40) -> str:
    rules = [f"r{n} ::= " + body.replace("x", f"r{n + 1}") for n in range(length)]
    return "\n".join(["root ::= r0", *rules, f"r{length} ::= {last}"])


def _nested(repeat: str, times: int) -> str:
    text = "a?"
    for _ in range(times):
        text = f"({text}){repeat}"
    return text


@pytest.mark.parametrize(
    "grammar",
    [
        _chain("x x | x", '"a"?'),
        _chain("x | x", '"a"'),
        _chain("(x)? x?", '"a"?'),
        _chain("x", '"a"', 5000),
        'root ::= "\\"" ' + _nested("{1,2}", 9).replace("a?", '"a"?'),
    ],
    ids=lambda text: text[:40],
)
def test_grammar_with_exponential_ambiguity_is_refused(grammar: str) -> None:
    assert grammar_ways(grammar) > MAX_WAYS


@pytest.mark.parametrize(
    "pattern", [_nested("{1,2}", 9), _nested("{0,3}", 8), "^(" + _nested("{2,4}", 6) + ")*$", "(a?b?c?|a?|b?){0,9}" * 3]
)
def test_pattern_with_exponential_ambiguity_is_refused(pattern: str) -> None:
    assert pattern_ways(pattern) > MAX_WAYS


JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    "grammar",
    [JSON_GRAMMAR, 'root ::= "yes" | "no"', 'root ::= ("a"*)* "b"', _chain("x x", '"a"'), "root ::= [a-z]{1,5000}", ""],
    ids=lambda text: text[:20],
)
def test_common_grammars_pass(grammar: str) -> None:
    assert grammar_ways(grammar) < 100


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:\d{2})?)?$",
        r"^(?:[a-z0-9!#$%&'*+/=?^_`{|}~-]+(?:\.[a-z0-9!#$%&'*+/=?^_`{|}~-]+)*)@(?:[a-z0-9]+\.)+[a-z]{2,}$",
        r"^(\s*[A-Za-z]+\s*,?)*$",
        r"^(?P<x>a)?[\]\)]{0,500}\p{L}+$",
        r"^(a?){20}$",
        "(",
    ],
)
def test_common_patterns_pass(pattern: str) -> None:
    assert pattern_ways(pattern) < 100
