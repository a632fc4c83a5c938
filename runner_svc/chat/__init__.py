"""A chat on one model: prompts, tool rounds, signals and repetition checks around the engine's turns."""
