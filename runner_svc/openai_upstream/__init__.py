"""Client for servers that implement the OpenAI API."""
