"""Authentication by API key, access rules per endpoint, and rate limits per tenant."""
