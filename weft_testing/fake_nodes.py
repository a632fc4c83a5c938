"""A fake vLLM on several nodes: `python -m weft_testing.fake_nodes serve MODEL --nnodes 2 --node-rank 0 ...`.

Like `vllm serve` in its multi-node mode: the node of rank 0 serves once all others have joined it at its master
address; the others (`--headless`) do not serve. The loss of a node ends all of them, the head with an error.
"""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from weft_testing.fake_backend.__main__ import main as serve

JOIN_PAUSE_SECONDS = 0.05
RANK_BYTES = 4
EXIT_LOST = 1


def main(arguments: Sequence[str]) -> None:
    """Runs one node until a signal, or until another node is lost."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29501)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--headless", action="store_true")
    node, rest = parser.parse_known_args(arguments)
    address = (node.master_addr, node.master_port)
    if node.headless:
        _work(address, node.node_rank)
    else:
        _await_workers(address, node.nnodes - 1)
        serve(rest)


def _await_workers(address: tuple[str, int], count: int) -> None:
    """Waits until all workers have joined; each is watched from then on."""
    listener = socket.create_server(address)
    for _ in range(count):
        _say(f"INFO waiting for {count} worker nodes at {address[0]}:{address[1]}")
        connection, _ = listener.accept()
        rank = int.from_bytes(connection.recv(RANK_BYTES), "big")
        _say(f"INFO node {rank} has joined")
        threading.Thread(target=_watch, args=(connection, rank), daemon=True).start()


def _watch(worker: socket.socket, rank: int) -> None:
    try:
        worker.recv(1)
    except OSError as error:
        _say(f"DEBUG {error}")
    _say(f"ERROR Engine core died: the worker process of node {rank} is lost")
    os._exit(EXIT_LOST)


def _work(address: tuple[str, int], rank: int) -> None:
    """Joins the head, even if it starts late, and returns when it is gone."""
    while True:
        try:
            head = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(JOIN_PAUSE_SECONDS)
    head.sendall(rank.to_bytes(RANK_BYTES, "big"))
    _say(f"INFO node {rank} works")
    head.recv(1)
    sys.exit(EXIT_LOST)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
