"""OpenAI's API: endpoints, request schemas, and pure translation to the mesh's messages and back.

Schemas are strict models: no conversion between types, a bound on every number. Unknown fields are accepted and
ignored, unknown values are not. Limits that an operator can change are in `gateway.gateway_config.RequestLimits`.
"""
