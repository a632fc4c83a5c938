"""A small MCP server: it keeps notes for as long as it runs."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add(note: str) -> str:
    """Keep a note."""
    notes.append(note)
    return f"Note {len(notes)} kept."


@server.tool()
def search(word: str) -> list[str]:
    """Find the notes that hold a word."""
    return [note for note in notes if word.lower() in note.lower()]


if __name__ == "__main__":
    server.run("stdio")
