"""The program `weft` by its installed name, which is what shells complete."""

from weft_app.cli.main import app

if __name__ == "__main__":
    app(prog_name="weft")
