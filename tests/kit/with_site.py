"""Runs `weft` with a folder of packages: `python -m kit.with_site FOLDER python -m weft_app.cli.main ...`."""

import os
import sys

from weft_app.cli.main import app


def main() -> None:
    """Adds the folder to the import path of this process and its children, then runs `weft`."""
    site = sys.argv[1]
    sys.path.insert(1, site)
    os.environ["PYTHONPATH"] = os.pathsep.join([site, *filter(None, sys.path[2:])])
    sys.argv = ["weft", *sys.argv[5:]]
    app()


if __name__ == "__main__":
    main()
