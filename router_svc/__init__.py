"""The router: decides where each request runs and signs tickets. It does not relay other clients' streams."""
