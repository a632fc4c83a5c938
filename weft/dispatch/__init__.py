"""Dispatch of requests: their placement by the router and their execution on a runner.

`placement` has the port to the router and its values, `remote_router` the router over gRPC, `dispatcher` the code that
gets a grant, calls the runner, fails over before the first content, and writes the receipt. `fleet` is the view of the
mesh, `agents` resolves `agent/<name>`, `tickets` has the tickets that a router signs and a runner checks.

Nothing is imported here: a runner uses tickets and frames, and would import the dispatcher with them.
"""
