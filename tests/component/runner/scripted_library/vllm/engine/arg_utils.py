"""The arguments of an engine, and their flags."""

import argparse
import json
from argparse import ArgumentParser, Namespace

from scripted_faults import misbehave_at_load

from vllm import SWITCHES, say
from vllm.recorded import FLAGS, Fields, fields_of

NUMBERS = {"max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "tensor_parallel_size", "max_lora_rank"}


class AsyncEngineArgs(Fields):
    recorded = ("EngineArgs", "AsyncEngineArgs")

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        flags = fields_of(*AsyncEngineArgs.recorded)
        for flag in FLAGS:
            name = flag.removeprefix("--").replace("-", "_")
            if flags.get(name) or name == "enable_prefix_caching":
                parser.add_argument(flag, action=argparse.BooleanOptionalAction)
            elif name in NUMBERS:
                parser.add_argument(flag, type=int)
            else:
                parser.add_argument(flag, type=json.loads if name.endswith(("config", "prompt")) else str)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "AsyncEngineArgs":
        known = fields_of(*cls.recorded)
        # Here rather than in the load, which is not in the main thread.
        say("INFO [cpu_model_runner.py:68] Starting to load model")
        misbehave_at_load(SWITCHES)
        return cls(**{name: value for name, value in vars(args).items() if name in known})
