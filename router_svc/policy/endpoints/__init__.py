"""Where requests can go: candidates, pools, routes, their health, and the choice of one endpoint."""
