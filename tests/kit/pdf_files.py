"""PDF files for tests."""

import io

from pypdf import PdfReader, PdfWriter


def pdf(*texts: str) -> bytes:
    """A PDF with a page for each text, of Latin-1 without parentheses; "": a page without text."""
    pages = [f"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F1 3 0 R >> >> /Contents {at} 0 R >>".encode()
             for at in range(4, 4 + 2 * len(texts), 2)]  # fmt: skip
    kids = " ".join(f"{at} 0 R" for at in range(5, 5 + 2 * len(texts), 2))
    bodies = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(texts)} /MediaBox [0 0 612 792] >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for text, page in zip(texts, pages, strict=True):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("latin-1") if text else b""
        bodies += [b"<< /Length %d >>\nstream\n%s\nendstream" % (len(drawn), drawn), page]
    file, places = b"%PDF-1.4\n", []
    for number, body in enumerate(bodies, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(bodies) + 1
    return file + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
        % (count, table, count, len(file))
    )


def encrypted(file: bytes, password: str) -> bytes:
    """A PDF that needs a password to be read."""
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(file)))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="AES-256")
    written = io.BytesIO()
    writer.write(written)
    return written.getvalue()
