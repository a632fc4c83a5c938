"""Where requests can go: candidates, pools, routes, endpoint health, and the choice of an endpoint."""
