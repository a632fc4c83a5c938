"""The stateless HTTP gateway: OpenAI-compatible JSON and SSE on the outside, `weft.dispatch` on the inside.

`service.build` makes the service that `weft_app.compose` composes; `app.app_over` makes the ASGI application alone.
"""
