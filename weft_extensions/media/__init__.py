"""Images, transcriptions and speech: OpenAI's endpoints, tasks and commands."""
