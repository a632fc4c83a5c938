"""Media in requests. Only the gateway fetches addresses; the services behind it get bytes.

A handler creates one `RequestMedia` for a request (`deps.request_media(params)`), translates with it (`image(url,
field)`, `encoded_image(...)`, `encoded_audio(...)`) and passes it to `Work`, which awaits `supply` before the request
is dispatched. A handler that dispatches by itself awaits `supply(payload, media, deps.media)`.
"""

from gateway.config import MediaConfig
from gateway.media.request_media import MediaAddress, MediaSource, NoMediaSource, RequestMedia, supply

__all__ = ["MediaAddress", "MediaConfig", "MediaSource", "NoMediaSource", "RequestMedia", "supply"]
