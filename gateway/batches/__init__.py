"""Files and batches, in the words of OpenAI's API: lines become tasks, and what became of them becomes files."""
