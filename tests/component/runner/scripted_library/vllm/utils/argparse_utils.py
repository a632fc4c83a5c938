"""The library's parser."""

from argparse import ArgumentParser


class FlexibleArgumentParser(ArgumentParser): ...
