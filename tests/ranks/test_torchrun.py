"""A script that ``torchrun`` starts trains as without Ebbtide, and a refusal on one rank is an error of both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rank_cases.launch import free_port

SCRIPT = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ebbtide
from rank_cases.cases import WIDTH, Net, bits

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

def trained(rows, budget=None):
    net = Net()
    if budget:
        ebbtide.fit(net, budget, progress=None, options=ebbtide.Options(effort=20))
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    for _ in range(3):
        wrapper(torch.randn(rows, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return bits(net)

same = trained(64) == trained(64, "80%")
try:
    said = trained(256 if rank == 1 else 64, "200KiB")
except ebbtide.errors.BudgetError as error:
    said = str(error)[:14]
open(f"{os.environ['RANK_FILES']}-{rank}", "w").write(f"{same} {said}")
dist.barrier()
dist.destroy_process_group()
"""


def test_torchrun_starts_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RANK_FILES": str(tmp_path / "rank")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "rank-0").read_text() == "True rank 1: Does n"
    assert (tmp_path / "rank-1").read_text().startswith("True Does not fit")
    assert "TCPStore" not in done.stderr, "warnings of the network when ranks end"
