"""A job done by several processes of this machine, which share its cores; for tools/bench.py and experiments/speed."""

import atexit
import multiprocessing
import os
from unittest import mock

import torch

import parallel


class Team:
    """`size` processes with their share of the threads, which call work(pipe, *args) and answer there what they are
    asked, in seconds by part."""

    def __init__(self, size, work, *args):
        spawn = multiprocessing.get_context("spawn")
        self.members = []
        share = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size))}
        for place in parallel.places(size) if size > 1 else [{}]:
            mine, theirs = spawn.Pipe()
            with mock.patch.dict(os.environ, place | share):
                process = spawn.Process(target=work, args=(theirs, *args), daemon=True)
                process.start()
            theirs.close()
            self.members.append((process, mine))
        atexit.register(self.dismiss)

    def ask(self, *job):
        """All do it at once; what the slowest one answers."""
        for _, pipe in self.members:
            pipe.send(job)
        return max((pipe.recv() for _, pipe in self.members), key=lambda answer: sum(answer.values()))

    def dismiss(self):
        for process, _ in self.members:
            process.kill()
            process.join()
