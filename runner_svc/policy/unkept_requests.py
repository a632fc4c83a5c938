"""What an answer shows an engine to have left out of a request without a word."""

MIN_CHECKED_WORDS = 512
"""Prompts of fewer words fit every context that is in use; a template may shorten them for reasons of its own."""
MIN_COUNTED_SHARE = 0.8
"""Tokens that an engine counts, per word of the prompt. A word is one token or more, so that a whole prompt has a share
of 1 and mostly 1.3; what is below has lost a fifth at least. Text without spaces has few words and raises no alarm."""


def dropped_prompt(words: int, prompt_tokens: int) -> str:
    """What to say of a prompt of so many words of which the engine counted so many tokens; empty: nothing.

    `prompt_tokens` with those from a cache among them; 0: the engine counts none.
    """
    if words < MIN_CHECKED_WORDS or not prompt_tokens or prompt_tokens >= MIN_COUNTED_SHARE * words:
        return ""
    return (
        f"the engine has read {prompt_tokens} tokens of a prompt of {words} words: it dropped a part of it; "
        "give it a larger context, or send less"
    )
