"""Library names and terms that user-visible messages must not contain."""

import re

LIBRARY_WORDS = re.compile(
    r"Value error,|Assertion error,|Extra inputs|Field required|Input should|Input tag"
    r"|\b(?:String|List|Dictionary) should|unable to parse|pydantic|discriminator"
    r"|\bgrpc\.|AioRpcError|<_InactiveRpcError|StatusCode\.|ssl_transport_security"
    r"|sqlite3?\.|sqlalchemy|OperationalError|IntegrityError|\(Background on this error"
    r"|yaml\.(?!org)|ScannerError|ParserError|could not find expected|found character"
    r"|while (?:scanning|parsing) a (?:block|flow|quoted|plain|simple|node)|EOF while"
    r"|msgspec|json\.decoder|Expecting (?:value|property name|',' delimiter)|Traceback \(most recent|\.py\", line"
    r"|KeyError|TypeError|ValueError|AttributeError|Errno \d"
)


def library_words(message: str) -> list[str]:
    return [found[0] for found in LIBRARY_WORDS.finditer(message)]
