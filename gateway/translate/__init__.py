"""Pure functions between OpenAI JSON and the mesh's messages. No I/O, no clock, no framework.

`chat`, `completions` and `embeddings` turn requests into payloads; `chat_answer`, `chat_stream`, `completion_answer`,
`completion_stream`, `embeddings` and `models` turn what comes back into JSON and SSE.
"""
