"""The predecessor's planners (ckptplan 0.1.0rc1), in a process of their own: its package has the name of ours.

    python -m pip install --no-deps --target FOLDER ckptplan==0.1.0rc1

Only the numbers of the blocks that its plans recompute come back. It takes bytes per block on CUDA only; it gets
those that its own arithmetic (allocated after a block's forward, less before it, less the inputs) gives here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptplan.profiles import ChainProfile
from tests.benchmarks.race.eager import Entrant, plan_text, with_checkpoints
from tests.benchmarks.race.subjects import Subject

RIVAL = "predecessor 0.1.0rc1"
PROGRAM = Path(__file__).with_name("predecessor_program.py")
PLANNERS = ("dynamic_programming", "greedy")
BUCKETS_BYTES = (1 << 20, 1 << 14)  # its default, and a finer one for small blocks


def predecessor(
    subject: Subject, profile: ChainProfile, budgets_bytes: Sequence[int], folder: Path
) -> Iterator[Entrant]:
    """A plan for each of its planners and each budget. Raises ``CalledProcessError`` where its process fails."""
    request = {
        "folder": str(folder.resolve()),
        "blocks": _its_profile(profile),
        "budgets_bytes": list(budgets_bytes),
        "planners": PLANNERS,
        "buckets_bytes": BUCKETS_BYTES,
    }
    answer = subprocess.run(
        [sys.executable, PROGRAM], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    for found in json.loads(answer.stdout):
        chosen = found["recomputed"]
        yield Entrant(
            RIVAL,
            plan_text(chosen, len(profile)),
            with_checkpoints(subject, chosen),
            asked_bytes=found["budget_bytes"],
            solve_s=found["solve_s"],
        )


def _its_profile(profile: ChainProfile) -> list[dict[str, float]]:
    inputs = profile.pre.output_bytes if profile.pre is not None else profile.input_bytes
    blocks = []
    for block in profile:
        assert block.keep is not None
        made = sum(size for size, given in zip(block.output_bytes, block.output_is_input, strict=True) if given is None)
        estimate = max(0, block.keep.saved_bytes + made - sum(inputs))
        blocks.append({"activation_bytes": estimate, "cost": (block.forward_flops or 0) / 1e6})
        inputs = block.output_bytes
    return blocks
