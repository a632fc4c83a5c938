"""Requests: headers, bodies within their limits, strict JSON, forms and query parameters."""
