"""The lock files of the engines' environments, in folders that have the environments' names."""

from pathlib import Path

FOLDER = Path(__file__).parent
