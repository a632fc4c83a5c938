"""The library's errors about requests."""


class VLLMClientError(Exception): ...


class VLLMValidationError(VLLMClientError): ...
