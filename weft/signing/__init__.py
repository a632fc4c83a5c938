"""Tokens that authorize operations: creation, and the formats shared with verifiers."""
