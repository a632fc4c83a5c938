"""Makes what the tests of containers run: the programs, and the images. They need minutes, most of them of downloads.

python tests/containers/prepare.py
"""

import docker_engine
import podman


def main() -> None:
    """Does nothing where the tests are skipped, and little where everything is there."""
    if not podman.missing():
        program = podman.Podman.found()
        for target in ("mesh", "llama-cpp"):
            program.build_weft(target)
    if not docker_engine.missing():
        with docker_engine.running_docker() as docker:
            docker.build_stand_ins()
            docker.run(*docker_engine.project(["build"]), POSTGRES_PASSWORD="unused")


if __name__ == "__main__":
    main()
