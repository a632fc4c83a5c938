"""The program `weft` with unlimited time for completions.

For tests of the completions themselves: a busy machine may need longer than a shell should wait.
"""

import weft_app.cli.completion
from weft_app.cli.main import app

PATIENT_SECONDS = 60.0

if __name__ == "__main__":
    weft_app.cli.completion.CALL_TIMEOUT_SECONDS = PATIENT_SECONDS
    app(prog_name="weft")
