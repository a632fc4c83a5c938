"""The endpoint picker: external processor and access log service of a proxy that carries requests to runners."""
