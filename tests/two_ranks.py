"""A function run by two processes that train together."""

import socket

import torch

__all__ = ["run_two_ranks"]


def run_two_ranks(rank_main):
    """Run `rank_main(rank, port, queue)` on two ranks; what they put there, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=rank_main, args=(r, port, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        return sorted(queue.get(timeout=240) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()
