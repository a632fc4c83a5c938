"""OpenAI's Files and Batch APIs: lines of an input file become tasks, and their results an output file."""
