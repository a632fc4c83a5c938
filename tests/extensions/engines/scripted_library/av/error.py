"""The errors of PyAV that the reader of recordings knows."""


class FFmpegError(Exception):
    pass


class InvalidDataError(FFmpegError):
    pass
