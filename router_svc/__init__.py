"""The router: decides where each request runs. It signs permits and never carries a token of anybody else's stream."""
