"""Documents from files: all or nothing, and every error says where."""

import json

import pytest

from weft.documents import yaml_documents
from weft.documents.resource_kinds import ResourceKind
from weft.documents.yaml_documents import MAX_DOCUMENTS, MAX_FILE_BYTES, parse_document, read_documents, refuse_repeats
from weft.kernel.errors.error_tree import MAX_REFUSALS, FieldError, WeftError
from weft.kernel.errors.reasons import Reason

GOOD = "kind: agent\nname: good\nmodel: m\n"


def test_every_document_of_a_stream_is_read_in_order() -> None:
    documents = read_documents(f"{GOOD}---\nkind: llm\nname: m\n---\n# nothing here\n---\nkind: pool\nname: p\n", "f")
    assert [sourced.label for sourced in documents] == ["agent/good", "model/m", "pool/p"]


def test_list_document_is_read_item_by_item() -> None:
    text = json.dumps({"kind": "AgentList", "items": [{"kind": "agent", "name": name, "model": "m"} for name in "ab"]})
    assert [sourced.label for sourced in read_documents(text, "f")] == ["agent/a", "agent/b"]


@pytest.mark.parametrize("text", ["", "---\n", "# only words\n", "---\n---\n"])
def test_stream_without_documents_is_empty(text: str) -> None:
    assert read_documents(text, "f") == ()


def test_error_has_file_document_line_and_field() -> None:
    text = f"{GOOD}---\n{GOOD}---\nkind: agent\nname: bad\nmodel: m\nsystemPrompt: 7\n"
    with pytest.raises(FieldError) as refused:
        read_documents(text, "agents.yaml")
    assert refused.value.message.startswith("agents.yaml, document 3 (line 12): systemPrompt: ")


def refused_lines(text: str) -> list[str]:
    with pytest.raises(FieldError) as refused:
        read_documents(text, "a.yaml")
    return refused.value.message.splitlines()


def test_all_invalid_documents_are_reported() -> None:
    wrong = ("kind: widget\nname: a\n", "kind: agent\nname: b\n", "just words\n", "kind: [\n")
    assert [line.partition(": ")[0].strip() for line in refused_lines("---\n".join(wrong))] == [
        "a.yaml, document 1 (line 1)",
        "a.yaml, document 2 (line 4)",
        "a.yaml, document 3 (line 7)",
        "a.yaml, document 4 (line 10)",
    ]


def test_all_invalid_fields_of_a_document_are_reported_with_their_lines() -> None:
    text = (
        "kind: agent\nname: ..\nmodel: m\nsytemPrompt: x\ndefaultParams: {temperature: 3, stop: [a, 3], top_k: x}\n"
        "description: 7\n"
    )
    lines = refused_lines(text)
    where = "a.yaml, document 1 (line "
    assert [line.strip().removeprefix(where).split(": ")[:2] for line in lines] == [
        ["4)", "sytemPrompt"],
        ["5)", "defaultParams.stop[1]"],
        ["5)", "defaultParams.top_k"],
        ["6)", "description"],
        ["2)", "name"],
        ["5)", "defaultParams.temperature"],
    ]


def test_unreadable_value_is_not_also_reported_as_missing() -> None:
    (line,) = refused_lines("kind: agent\nname: 7\nmodel: m\n")
    assert line == "a.yaml, document 1 (line 2): name: must be a text"
    (line,) = refused_lines("kind: agent\nname: a\nmodel: 7\n")
    assert line == "a.yaml, document 1 (line 3): model: must be a text"


def test_errors_beyond_the_limit_are_counted() -> None:
    per_document, documents = MAX_REFUSALS + 3, 2
    fields = "".join(f"nonsense{number}: 1\n" for number in range(per_document))
    lines = refused_lines("---\n".join([f"kind: agent\nname: a\nmodel: m\n{fields}"] * documents))
    assert len(lines) == MAX_REFUSALS + 1
    assert lines[-1] == f"  and {per_document * documents - MAX_REFUSALS} more"


def test_all_repeated_names_are_reported() -> None:
    with pytest.raises(FieldError) as refused:
        refuse_repeats(read_documents("---\n".join([GOOD] * 3), "a.yaml"))
    assert [line.partition(" (")[0].strip() for line in refused.value.message.splitlines()] == [
        "a.yaml, document 2",
        "a.yaml, document 3",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}---\nkind: [\n", "document 2 (line"),
        (f"{GOOD}---\nkind: agent\nname: a\nname: b\n", "document 2 (line 7): the key 'name' appears twice"),
        (f"{GOOD}---\nkind: agent\nname: a\n", "document 2 (line 5): needs exactly one of model and pool"),
        (f"{GOOD}---\njust words\n", "document 2 (line 5): a document is a mapping"),
        (f"{GOOD}---\nname: a\n", "document 2 (line 5): kind: must be one of model, agent, runner, pool, route"),
        ("kind: widget\nname: a\n", "document 1 (line 1): kind: 'widget' is not a kind"),
        ("kind: profile\nname: a\n", "document 1 (line 1): kind: profiles were removed; use: weft apply -f FILE"),
        ("kind: agent\nname: a\nmodel: m\ndefaultParams:\n  temperature: 3\n", "(line 5): defaultParams.temperature"),
        ("kind: agent\nname: a\nmodel: m\ndefaultParams: {stop: [a, 3]}\n", "(line 4): defaultParams.stop[1]"),
        ("kind: agent\nname: a\nmodel: m\nsystem_promt: x\n", "(line 4): system_promt: there is no such field"),
        ("kind: agent\nname: a\nmodel: m\nsystem_prompt: 7\n", "(line 4): system_prompt: must be a text"),
        (
            "kind: agent\nname: a\nmodel: m\nsystem_prompt: x\nsystemPrompt: y\n",
            "(line 5): systemPrompt: is set twice",
        ),
        ("kind: agent\nmodel: m\n", "document 1 (line 1): name: is missing"),
        ("kind: route\nname: r\ncandidates: []\n", "(line 3): candidates: must have at least 1, has 0"),
        (f"kind: route\nname: r\ncandidates: {[f'm{i}' for i in range(17)]}\n", "must have at most 16, has 17"),
        ("kind: route\nname: q\n", "document 1 (line 1): candidates: is missing"),
        ("kind: route\nname: q\ncandidates: [a, a]\n", "(line 3): candidates[1]: must not appear twice"),
        ("kind: route\nname: q\ncandidates: [a, ..]\n", "(line 3): candidates[1]: must be 1 to 128 letters"),
        ("kind: route\nname: q\ncandidates: [a]\nbudgetSeconds: 0\n", "(line 4): budgetSeconds: "),
        ("kind: route\nname: q\ncandidates: [a]\nbudgetSeconds: 86401\n", "(line 4): budgetSeconds: "),
        ("kind: route\nname: q\ncandidates: [a]\nkeepAlive: soon\n", "(line 4): keepAlive: must be seconds such as"),
        ("kind: route\nname: q\ncandidates: [a]\nkeepAlive: true\n", "(line 4): keepAlive: must be seconds such as"),
        ("kind: route\nname: q\ncandidates: [a]\nkeepAlive: 9999d\n", "(line 4): keepAlive: must be at most"),
        ("kind: route\nname: q\ncandidates: [a]\nfallback: b\n", "(line 4): fallback: there is no such field"),
        ("kind: alias\nname: claude-*\ntarget: m\n", "write `pattern: 'claude-*'` beside it"),
        ("kind: model\nname: m\nskills: [sight]\n", "(line 3): skills[0]: "),
        ("kind: agent\nname: a\nmodel: m\n<<: {x: 1}\n", "merge keys"),
        ("kind: !!python/object/apply:os.system ['true']\n", "tags such as !!python are not supported"),
        ("? [a]\n: b\n", "a key must be a plain word"),
        ('{"kind": "model", "kind": "agent"}', "the key 'kind' stands twice"),
        ('{"kind": "model", "name": "m", "contextTokens": NaN}', "NaN is not a number"),
        ('{"kind": "ModelList", "items": [{"name": "m"}, {"name": ".."}]}', "items[1].name"),
        ('{"kind": "ModelList", "items": {}}', "items: a ModelList has kind and items"),
        ('{"kind": "ModelList", "items": [{"kind": "agent", "name": "m"}]}', "items[0].kind: must be model here"),
        ("kind: model\nname: \x01\n", "a character that may not stand in YAML"),
        ("kind: model\nname: m\ncontextTokens: " + "9" * 5000, "a value cannot be read"),
    ],
)
def test_one_broken_document_refuses_the_whole_file(text: str, message: str) -> None:
    with pytest.raises(WeftError) as refused:
        read_documents(text, "f.yaml")
    assert message in refused.value.message
    assert refused.value.message.startswith("f.yaml")
    assert refused.value.reason in (Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST)


def _bomb() -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_bomb(), "once its aliases are followed"),
        ("a: &a [*a]\n", "an alias inside what it stands for"),
        ("[" * 10_000, "nested"),
        ("{a: " * 10_000, "nested"),
    ],
)
def test_expansion_bombs_are_refused_before_they_expand(text: str, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        read_documents(text, "f.yaml")


def test_recursive_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_documents, "MAX_YAML_NODES", 1_000)
    with pytest.raises(WeftError, match="more than 1,000 values"):
        read_documents("- 1\n" * 1_500, "f.yaml")


def test_harmless_alias_is_read() -> None:
    text = "kind: agent\nname: &name a\nmodel: *name\n"
    ((sourced),) = read_documents(text, "f.yaml")
    assert sourced.document.kind is ResourceKind.AGENT
    assert sourced.document.declared.model == "a"


def test_sizes_are_bounded() -> None:
    with pytest.raises(WeftError) as refused:
        read_documents("#" * (MAX_FILE_BYTES + 1), "f.yaml")
    assert refused.value.reason is Reason.REQUEST_TOO_LARGE
    text = "---\n".join(f"kind: runner\nname: r{number}\n" for number in range(MAX_DOCUMENTS + 1))
    with pytest.raises(WeftError, match="more than 1,000 documents"):
        read_documents(text, "f.yaml")


def test_dates_are_strings_and_json_escapes_are_characters() -> None:
    ((dated),) = read_documents(f"{GOOD}description: 2026-01-01\n", "f.yaml")
    assert dated.document.kind is ResourceKind.AGENT
    assert dated.document.declared.description == "2026-01-01"
    escaped = '{"kind": "agent", "name": "a", "model": "m", "description": "\\ud83d\\ude00"}'
    ((smiling),) = read_documents(escaped, "f.json")
    assert smiling.document.kind is ResourceKind.AGENT
    assert smiling.document.declared.description == "😀"


def test_flow_style_yaml_is_not_mistaken_for_broken_json() -> None:
    assert read_documents("{kind: model, name: m}", "f")[0].label == "model/m"


def test_two_documents_of_one_resource_are_refused_with_both_positions() -> None:
    documents = read_documents(f"{GOOD}---\n{GOOD}", "f.yaml")
    with pytest.raises(FieldError, match=r"document 2 .*agent/good has this name already, in f.yaml, document 1"):
        refuse_repeats(documents)


def test_names_are_unique_across_kinds_except_that_a_pool_may_share_a_model_name() -> None:
    refuse_repeats(read_documents("kind: model\nname: x\n---\nkind: pool\nname: x\n", "f.yaml"))
    with pytest.raises(FieldError, match="model/x has this name already"):
        refuse_repeats(read_documents("kind: model\nname: x\n---\nkind: runner\nname: x\n", "f.yaml"))


def test_kinds_that_share_no_names_may_have_the_same_name_in_one_file() -> None:
    """A backup with a tenant and an alias of one name, which the registry accepts, could not be applied."""
    alias, tenant = "kind: alias\nname: x\ntarget: m\n", "kind: tenant\nname: x\n"
    refuse_repeats(read_documents(f"kind: model\nname: x\n---\n{alias}---\n{tenant}", "f.yaml"))
    with pytest.raises(FieldError, match="alias/x has this name already"):
        refuse_repeats(read_documents(f"{alias}---\n{alias}", "f.yaml"))


def test_status_is_ignored_in_any_input() -> None:
    ((sourced),) = read_documents(f"{GOOD}status: {{nonsense: true}}\n", "f")
    assert sourced.document.observed is None


def test_body_may_omit_the_kind_implied_by_its_route() -> None:
    assert parse_document({"name": "m"}, ResourceKind.MODEL).kind == "model"
    with pytest.raises(FieldError, match="kind: must be model here"):
        parse_document({"kind": "agent", "name": "m"}, ResourceKind.MODEL)


def test_logit_bias_keys_may_be_strings_as_in_json() -> None:
    value = {"kind": "agent", "name": "a", "model": "m", "defaultParams": {"logit_bias": {"50256": -100}}}
    document = parse_document(value)
    assert document.kind is ResourceKind.AGENT
    assert document.declared.default_params.logit_bias == {50256: -100}
    with pytest.raises(FieldError, match="logit_bias"):
        parse_document(value | {"defaultParams": {"logit_bias": {"eos": -100}}})
