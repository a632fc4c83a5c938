"""weft: one endpoint over every model you can reach or wake.

This package is the kernel that the four services (`registry_svc`, `router_svc`, `runner_svc`, `gateway`) share.
Services never import each other; they meet in `weft.api` (the generated contracts) and `weft.dispatch` (placing and
running a request). `weft_app.compose` is the one composition root.
"""

__version__ = "0.1.0"
