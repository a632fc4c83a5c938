"""Which beginnings of prompts CTranslate2 keeps."""

import random

from weft_extensions.engines.ctranslate2.prefix_cache import (
    MIN_SHARED_TOKENS,
    NO_BEGINNING,
    Beginning,
    PrefixCache,
    common_tokens,
)

SYSTEM = tuple(f"s{number}" for number in range(40))


def _asked(cache: PrefixCache, prompt: tuple[str, ...]) -> Beginning:
    chosen = cache.choose(prompt)
    cache.note(prompt, chosen)
    return chosen


def test_same_prompt_is_found_up_to_its_last_token() -> None:
    cache = PrefixCache(200)
    assert _asked(cache, SYSTEM) == Beginning(39)
    assert _asked(cache, SYSTEM) == Beginning(39, cached=True)
    assert cache.usable_tokens == 39


def test_common_prefix_of_two_prompts_is_cached_by_the_second_and_found_by_the_third() -> None:
    cache = PrefixCache(400)
    ask = [(*SYSTEM, *(f"{name}{number}" for number in range(50))) for name in "abc"]
    assert _asked(cache, ask[0]) == Beginning(89)
    assert _asked(cache, ask[1]) == Beginning(40)
    assert _asked(cache, ask[2]) == Beginning(40, cached=True)


def test_growing_conversation_reuses_its_earlier_turns_and_is_cached_again_when_doubled() -> None:
    cache = PrefixCache(10_000)
    turns = tuple(str(number) for number in range(1000))
    lengths = [_asked(cache, turns[:length]) for length in (100, 150, 190, 300, 310)]
    assert [(each.tokens, each.cached) for each in lengths] == [
        (99, False),
        (99, True),
        (99, True),
        (99, True),
        (300, False),
    ]


def test_short_prefix_is_not_cached() -> None:
    cache = PrefixCache(10_000)
    one, other = ((*SYSTEM[: MIN_SHARED_TOKENS - 1], *(f"{name}{number}" for number in range(50))) for name in "ab")
    _asked(cache, one)
    assert _asked(cache, other) == Beginning(len(other) - 1), "a prompt of its own"


def test_single_token_and_zero_budget_cache_nothing() -> None:
    assert PrefixCache(100).choose(("a",)) == NO_BEGINNING
    assert PrefixCache(0).choose(SYSTEM) == NO_BEGINNING


def test_forgotten_prefix_is_never_used_again_although_the_library_has_it() -> None:
    cache = PrefixCache(200)
    _asked(cache, SYSTEM)
    assert cache.forget() == 39
    again = _asked(cache, SYSTEM)
    assert again == Beginning(38), "the library would recognise the beginning of 39 tokens"
    cache.forget()
    assert _asked(cache, SYSTEM) == Beginning(0, wants_reload=True), "there is room for no third one"
    cache.reloaded()
    assert _asked(cache, SYSTEM) == Beginning(39)


def test_half_of_the_cache_is_reserved_for_prefixes_seen_twice() -> None:
    cache = PrefixCache(100)
    first = (*SYSTEM, "a")
    assert _asked(cache, first) == Beginning(40)
    other = tuple(f"o{number}" for number in range(30))
    assert _asked(cache, other) == Beginning(0), "a first prompt may fill half of the room"
    assert _asked(cache, other) == Beginning(29)


def test_reload_is_requested_only_if_it_would_free_space() -> None:
    cache = PrefixCache(50)
    too_long = tuple(f"t{number}" for number in range(200))
    _asked(cache, too_long)
    assert _asked(cache, too_long) == Beginning(0), "it never fits"


def test_random_prompts_stay_within_the_budget_and_never_use_forgotten_prefixes() -> None:
    dice = random.Random(20_261_121)
    cache, budget = PrefixCache(300), 300
    held: dict[tuple[str, ...], int] = {}
    generation = 0
    hits = 0
    for _ in range(3000):
        match dice.randrange(12):
            case 0:
                cache.forget()
                generation += 1
            case 1:
                cache.reloaded()
                held.clear()
                generation += 1
            case _:
                name = dice.choice("abc")
                prompt = tuple(f"{name}{number}" for number in range(dice.randrange(1, 120)))
                chosen = _asked(cache, prompt)
                assert chosen.tokens < len(prompt)
                beginning = prompt[: chosen.tokens]
                if chosen.tokens:
                    # The library uses exactly what it has: a beginning that is said to be new must be new to it.
                    assert chosen.cached == (beginning in held)
                    assert held.setdefault(beginning, generation) == generation
                hits += chosen.cached
                assert sum(map(len, held)) <= budget
    assert hits > 100


def test_common_tokens_are_counted_from_the_start() -> None:
    assert common_tokens("abcd", "abxd") == 2
    assert common_tokens("", "a") == 0
