"""Dispatch of requests: their placement by the router and their execution on a runner.

`placement` defines the port to the router, `remote_router` implements it over gRPC. `dispatcher` obtains a grant, calls
the runner, fails over before the first content and writes the receipt. `fleet` is the view of the mesh, `agents`
resolves `agent/<name>`, and `tickets` signs and checks a router's tickets.

Nothing is imported here, so that runners can import tickets and frames without the dispatcher.
"""
