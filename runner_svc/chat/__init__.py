"""A chat on one model: prompts, rounds of tools, signals and repetition, around the turns of an engine."""
