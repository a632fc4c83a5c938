"""`nft add rule ip nat postrouting masquerade`, for machines whose kernel has nftables and whose disk has no nft.

Run in the network namespace that is to translate. Exits with the kernel's error number.
"""

import socket
import struct
import sys

NETLINK_NETFILTER = 12
NFTABLES = 10
BATCH_BEGIN, BATCH_END = 0x10, 0x11
NEW_TABLE, NEW_CHAIN, NEW_RULE = 0, 3, 6
REQUEST, ACK, CREATE = 0x1, 0x4, 0x400
IPV4, POSTROUTING, SOURCE_NAT_PRIORITY = 2, 4, 100
NESTED = 0x8000
ERROR_MESSAGE = 2


def attribute(kind: int, data: bytes) -> bytes:
    length = 4 + len(data)
    return struct.pack("=HH", length, kind) + data + b"\0" * (-length % 4)


def text(kind: int, value: str) -> bytes:
    return attribute(kind, value.encode() + b"\0")


def number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("!I", value))


def nested(kind: int, *parts: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(parts))


def message(kind: int, flags: int, sequence: int, family: int, resource: int, body: bytes = b"") -> bytes:
    payload = struct.pack("=BB", family, 0) + struct.pack("!H", resource) + body
    return struct.pack("=IHHII", 16 + len(payload), kind, flags, sequence, 0) + payload


def batch() -> bytes:
    table, chain = "nat", "postrouting"
    hook = nested(4, number(1, POSTROUTING), number(2, SOURCE_NAT_PRIORITY))
    expression = nested(1, text(1, "masq"), nested(2))
    bodies = [
        (NEW_TABLE, text(1, table)),
        (NEW_CHAIN, text(1, table) + text(3, chain) + hook + text(7, "nat")),
        (NEW_RULE, text(1, table) + text(2, chain) + nested(4, expression)),
    ]
    steps = [
        message((NFTABLES << 8) | kind, REQUEST | ACK | CREATE, sequence, IPV4, 0, body)
        for sequence, (kind, body) in enumerate(bodies, start=2)
    ]
    begin = message(BATCH_BEGIN, REQUEST, 1, 0, NFTABLES)
    return b"".join([begin, *steps, message(BATCH_END, REQUEST, 9, 0, NFTABLES)])


def main() -> int:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as netlink:
        netlink.bind((0, 0))
        netlink.settimeout(5.0)
        netlink.send(batch())
        for _ in range(3):
            answer = netlink.recv(65_536)
            kind = struct.unpack_from("=H", answer, 4)[0]
            error = -struct.unpack_from("=i", answer, 16)[0]
            if kind == ERROR_MESSAGE and error:
                return int(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
