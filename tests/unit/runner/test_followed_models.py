"""Which models of a server's list are served, and under which names."""

from hypothesis import given
from hypothesis import strategies as st

from runner_svc.policy.followed_models import LOOKS_UNTIL_GONE, FollowedList, FollowedModel
from weft.kernel.values.names import ascii_name, is_model_name


def nothing_taken(_: str) -> bool:
    return False


def following(most: int = 8) -> FollowedList:
    return FollowedList(server="box", most=most)


def names(models: FollowedList) -> dict[str, str]:
    return {each.upstream: each.name for each in models.served}


def test_model_has_its_server_side_name() -> None:
    models = following()
    models.step(["llama3.2:3b", "nomic-embed-text:latest", "Qwen/Qwen3-8B", "/models/smol.gguf"], nothing_taken)
    assert list(names(models).values()) == ["llama3.2:3b", "nomic-embed-text", "Qwen/Qwen3-8B", "smol"]


def test_letters_that_are_not_ascii_are_kept_in_the_name_of_a_model() -> None:
    """`über/模型` became `ber`, and models with such names alone became `model` and a number."""
    listed = ["über/模型", "uber/模型", "ber", "模型", "型模", "é", "e\u0301", "Ωmega:7b", "/models/日本.gguf"]
    models = following(most=20)
    models.step(listed, nothing_taken)
    found = names(models)
    assert found == {
        upstream: ascii_name(upstream.removeprefix("/models/").removesuffix(".gguf")) for upstream in listed
    }
    assert len(set(found.values())) == len(listed)
    assert all(map(is_model_name, found.values()))
    assert found["über/模型"] == "xn--ber-goa/xn--xgs754b"


def test_model_appears_when_the_server_lists_it() -> None:
    models = following()
    models.step(["a"], nothing_taken)
    change = models.step(["a", "b"], nothing_taken)
    assert [each.name for each in change.added] == ["b"]
    assert not change.gone


def test_model_is_removed_when_missing_from_two_consecutive_lists() -> None:
    models = following()
    models.step(["a", "b"], nothing_taken)
    assert not models.step(["b"], nothing_taken).gone
    assert [each.name for each in models.step(["b"], nothing_taken).gone] == ["a"]
    assert names(models) == {"b": "b"}


def test_temporarily_empty_server_list_removes_no_model() -> None:
    models = following()
    models.step(["a"], nothing_taken)
    for _ in range(3 * LOOKS_UNTIL_GONE):
        assert not models.step([], nothing_taken).gone
        assert not models.step(["a"], nothing_taken).gone
    assert names(models) == {"a": "a"}


def test_models_beyond_the_limit_are_skipped_and_counted() -> None:
    models = following(most=2)
    change = models.step(["a", "b", "c", "d"], nothing_taken)
    assert (len(change.added), change.left_out) == (2, 2)


def test_freed_capacity_is_used() -> None:
    models = following(most=1)
    for _ in range(LOOKS_UNTIL_GONE):
        models.step(["a"], nothing_taken)
    for _ in range(LOOKS_UNTIL_GONE):
        models.step(["b"], nothing_taken)
    models.step(["b"], nothing_taken)
    assert names(models) == {"b": "b"}


def test_name_already_on_the_runner_is_not_used_again() -> None:
    models = following()
    models.step(["smol"], lambda name: name == "smol")
    assert names(models) == {"smol": "box-smol"}


def test_model_keeps_its_owner_prefix_unless_it_collides_with_another_kind() -> None:
    models = following()
    models.step(["a/smol", "b/smol", "agent/smol", "a b/c", "models/smol.gguf"], nothing_taken)
    assert names(models) == {
        "a/smol": "a/smol",
        "b/smol": "b/smol",
        "agent/smol": "box-agent/smol",
        "a b/c": "a-b/c",
        "models/smol.gguf": "smol",
    }


def test_owner_prefixed_name_taken_elsewhere_gets_the_server_name_too() -> None:
    models = following()
    models.step(["a/smol"], lambda name: name == "a/smol")
    assert names(models) == {"a/smol": "box-a/smol"}


def test_name_used_by_another_runner_is_not_taken() -> None:
    models = following()
    models.step(["smol"], nothing_taken)
    assert models.note_taken({"smol"}) == (FollowedModel(name="smol", upstream="smol"),)
    models.step(["smol"], nothing_taken)
    assert names(models) == {"smol": "box-smol"}


def test_models_of_an_earlier_run_stay_until_missing_from_a_list() -> None:
    models = following()
    models.restore([FollowedModel(name="old", upstream="a/old")])
    change = models.step(["a/old", "new"], nothing_taken)
    assert [each.name for each in change.added] == ["new"]
    assert names(models) == {"a/old": "old", "new": "new"}


@given(st.lists(st.lists(st.text(max_size=12), max_size=12), max_size=6))
def test_served_names_are_valid_unique_and_bounded_for_any_server_list(lists: list[list[str]]) -> None:
    models = following(most=5)
    for listed in lists:
        models.step(listed, nothing_taken)
        found = [each.name for each in models.served]
        assert len(found) == len(set(found)) <= 5
        assert all(map(is_model_name, found))
