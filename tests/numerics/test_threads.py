"""Several threads that train at once: right bits, no crash, nothing measured across them."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest

SCRIPT = """
import copy, threading, torch, ebbflow
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x.square().mean()

torch.set_num_threads(1)
plain, x = Net(), torch.randn(64, 32)
expected = torch.autograd.grad(plain(x), list(plain.parameters()))
model = ebbflow.fit(copy.deepcopy(plain), "1MiB", effort=100)
for _ in range({warm}):
    model(x).backward()
right = []

def train():
    for _ in range(30):
        found = torch.autograd.grad(model(x), list(model.parameters()))
        right.append(all(torch.equal(a, b) for a, b in zip(found, expected)))

threads = [threading.Thread(target=train) for _ in range(3)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(right), all(right))
"""


@pytest.mark.parametrize("warm", [0, 1])
def test_threads_share_a_fitted_model(warm: int) -> None:
    # In a process of its own: what is tested ended it with a segmentation fault.
    script = copy.copy(SCRIPT).replace("{warm}", str(warm))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["90", "True"], ended.stderr[-2000:]
