"""The stateless HTTP gateway: OpenAI-compatible JSON and SSE on the outside, `weft.dispatch` on the inside.

`service.build` makes the service that `weft_app.compose` composes; `app.create_app` makes the ASGI application alone.
"""
