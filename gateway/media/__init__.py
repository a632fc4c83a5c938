"""Media in requests. Only the gateway fetches URLs; the services behind it receive bytes.

A handler creates a `RequestMedia` (`deps.request_media(params)`), translates the request with it and passes it to
`Work`, which awaits `supply` before the dispatch. A handler that dispatches without `Work` awaits `supply` itself.
"""

from gateway.gateway_config import MediaConfig
from gateway.media.request_media import MediaAddress, MediaSource, NoMediaSource, RequestMedia, supply

__all__ = ["MediaAddress", "MediaConfig", "MediaSource", "NoMediaSource", "RequestMedia", "supply"]
