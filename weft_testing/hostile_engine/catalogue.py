"""Every row of the catalogue, one file per family."""

from weft_testing.hostile_engine import calls, connections, contents, ends, texts
from weft_testing.hostile_engine.row import Ask, Row

FAMILIES = {
    "ends": ends.ROWS,
    "contents": contents.ROWS,
    "texts": texts.ROWS,
    "connections": connections.ROWS,
    "calls": calls.ROWS,
}
ROWS: tuple[Row, ...] = tuple(row for rows in FAMILIES.values() for row in rows)
MALFORMED: tuple[Row, ...] = tuple(row for row in ROWS if row.sees is not None)
OF_CHATS: tuple[Row, ...] = tuple(row for row in ROWS if row.ask is Ask.CHAT)
