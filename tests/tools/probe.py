"""A model that tells what is around its process, and waits for a line."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        around = {
            "seen": os.environ.get("SEEN"),
            "home": os.environ.get("HOME"),
            "threads": torch.get_num_threads(),
            "leads_its_group": os.getpgid(0) == os.getpid(),
            "name": Path("/proc/self/comm").read_text().strip(),
            "program": Path("/proc/self/cmdline").read_bytes().split(b"\0")[2].decode(),
        }
        print(json.dumps(around), flush=True)
        if not sys.stdin.readline():
            sys.exit(7)
        self.weight = nn.Parameter(torch.zeros(1))
