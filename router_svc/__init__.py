"""The router: decides where each request runs. It signs tickets and relays no token of other clients' streams."""
