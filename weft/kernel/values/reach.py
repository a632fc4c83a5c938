"""What a text makes a process open, read or run: `Reach` of common/v1/document.proto, without protobuf."""

from dataclasses import dataclass
from enum import IntEnum


class Reach(IntEnum):
    """See the contract, whose numbers these are."""

    UNSPECIFIED = 0
    NONE = 1
    NAME = 2
    ADDRESS = 3
    PACKET = 4
    SOURCE = 5
    VARIABLE = 6
    TEMPLATE = 7
    PROGRAM = 8
    TOOL = 9
    PARAMETERS = 10
    FILE = 11
    HEADER = 12


@dataclass(frozen=True, slots=True)
class Reaches:
    """Marks a setting or a parameter by what its text, or each of its texts, makes a process open, read or run."""

    reach: Reach


PLAIN = Reaches(Reach.NONE)
NAME = Reaches(Reach.NAME)
ADDRESS = Reaches(Reach.ADDRESS)
PACKET = Reaches(Reach.PACKET)
SOURCE = Reaches(Reach.SOURCE)
FILE = Reaches(Reach.FILE)
VARIABLE = Reaches(Reach.VARIABLE)
TEMPLATE = Reaches(Reach.TEMPLATE)
PROGRAM = Reaches(Reach.PROGRAM)
TOOL = Reaches(Reach.TOOL)
