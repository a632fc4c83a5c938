"""OpenAI's Responses API: translation, streams, stored and background responses, and conversations they continue."""
