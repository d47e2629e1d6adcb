"""What torchrun or Slurm's srun says of this process, from its environment. Torch-free."""

from __future__ import annotations

import os
import re


def world_size() -> int:
    """How many processes the launcher has started as one job; 1 without a launcher."""
    if "RANK" in os.environ:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) if "SLURM_PROCID" in os.environ else 1


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if world_size() > 1 else 0


def local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


def local_world_size() -> int:
    """How many of the processes are on this machine."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    per_node = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2)
    return int(per_node[0]) if per_node else world_size()


def name_slurm_ranks_as_torchrun() -> None:
    """Set what ``torch.distributed`` reads, where srun has started the ranks and nobody has set it."""
    if "RANK" in os.environ or world_size() == 1:
        return
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    for name, value in (
        ("MASTER_ADDR", first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))),
        ("MASTER_PORT", str(20000 + job % 10000)),  # jobs that share a node listen on ports of their own
        ("RANK", str(rank())),
        ("LOCAL_RANK", str(local_rank())),
        ("LOCAL_WORLD_SIZE", str(local_world_size())),
        ("WORLD_SIZE", str(world_size())),
    ):
        os.environ.setdefault(name, value)


def first_host(nodes: str) -> str:
    """The first name of a list such as ``node[07-09,12],gpu3``."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?", nodes.strip())
    if found is None:
        return "localhost"
    return found[1] + re.split(r"[-,]", found[2])[0] if found[2] else found[1]
