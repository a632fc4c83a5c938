"""Media inside requests. The gateway alone fetches addresses; everybody behind it gets bytes.

A route makes one `RequestMedia` for a request (`parts.request_media(asked)`), translates with it (`image(url, field)`,
`encoded_image(...)`, `encoded_audio(...)`) and hands it to `Work`, which awaits `supply` before the request is
dispatched. A route that dispatches by itself awaits `supply(payload, media, parts.media)`.
"""

from gateway.config import MediaConfig
from gateway.media.content import MediaFile
from gateway.media.request_media import MediaAddress, MediaSource, NoMediaSource, RequestMedia, supply

__all__ = ["MediaAddress", "MediaConfig", "MediaFile", "MediaSource", "NoMediaSource", "RequestMedia", "supply"]
