"""The program `weft` by its installed name, whose completions wait for the mesh as long as it takes.

What is offered is tested with it; a busy machine may take longer than a shell should wait.
"""

import weft_app.cli.completion
from weft_app.cli.main import app

PATIENT_SECONDS = 60.0

if __name__ == "__main__":
    weft_app.cli.completion.CALL_TIMEOUT_SECONDS = PATIENT_SECONDS
    app(prog_name="weft")
