"""ckptplan: measure a model's blocks, plan which to recompute for a memory budget, apply the plan, prove it.

The public names in data-path order. They load on first use, so `import ckptplan` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptplan.apply import CheckpointedSequential, apply_plan, checkpointed
    from ckptplan.autofit import Fitted, fit
    from ckptplan.batch_size import BatchPoint, Maximized, maximize
    from ckptplan.benchmark import BenchmarkResult, compare_results, run_benchmark
    from ckptplan.blocks import CheckpointableBlock, declare_blocks
    from ckptplan.certificate import Certificate, certify
    from ckptplan.check import check_plan
    from ckptplan.costs import CompiledOption, OffloadOption, SelectiveOption, StageCost
    from ckptplan.curve import CurvePoint, PlanCurve, plan_curve
    from ckptplan.devices import Calibration
    from ckptplan.dry_run import VerifiedPeak, verify_plan
    from ckptplan.equality import EqualityCheck, check_equality
    from ckptplan.errors import (
        BlockDeclarationError,
        CkptplanError,
        CompilerMissingError,
        ConfigError,
        DryRunError,
        InfeasibleTargetError,
        LargerBatchWarning,
        NoDifferentiableOutputError,
        PlanIncompatibleError,
        PlannerScaleError,
        SizeRefusedError,
        StepMismatchError,
        TimingOnlyProfileError,
        UnsupportedBoundaryError,
        UnsupportedPlanVersionError,
    )
    from ckptplan.estimate import EstimatedRange, estimate_profile, estimated_range
    from ckptplan.explanation import BlockExplanation, PlanExplanation, explain
    from ckptplan.measure import profile_blocks, profile_model
    from ckptplan.nodes import Compiled, CompiledModel, Keep, Offload, Recompute, Selective
    from ckptplan.plan import CheckpointDecision, CheckpointPlan
    from ckptplan.planners import plan_checkpoints
    from ckptplan.profiles import BlockProfile, ChainProfile, RegionProfile
    from ckptplan.sequence_length import LengthPoint, Longest, longest_sequence
    from ckptplan.simulate import PlanCost, simulate_plan
    from ckptplan.validate import validate_plan

__version__ = "0.1.0.dev0"

_MODULE_OF_NAME = {
    "CheckpointableBlock": "blocks",
    "declare_blocks": "blocks",
    "profile_blocks": "measure",
    "profile_model": "measure",
    "estimate_profile": "estimate",
    "estimated_range": "estimate",
    "EstimatedRange": "estimate",
    "Calibration": "devices",
    "StageCost": "costs",
    "SelectiveOption": "costs",
    "OffloadOption": "costs",
    "CompiledOption": "costs",
    "BlockProfile": "profiles",
    "RegionProfile": "profiles",
    "ChainProfile": "profiles",
    "plan_checkpoints": "planners",
    "Keep": "nodes",
    "Recompute": "nodes",
    "Selective": "nodes",
    "Offload": "nodes",
    "Compiled": "nodes",
    "CompiledModel": "nodes",
    "CheckpointDecision": "plan",
    "CheckpointPlan": "plan",
    "simulate_plan": "simulate",
    "PlanCost": "simulate",
    "check_plan": "check",
    "plan_curve": "curve",
    "PlanCurve": "curve",
    "CurvePoint": "curve",
    "certify": "certificate",
    "Certificate": "certificate",
    "explain": "explanation",
    "PlanExplanation": "explanation",
    "BlockExplanation": "explanation",
    "validate_plan": "validate",
    "apply_plan": "apply",
    "CheckpointedSequential": "apply",
    "checkpointed": "apply",
    "verify_plan": "dry_run",
    "VerifiedPeak": "dry_run",
    "check_equality": "equality",
    "EqualityCheck": "equality",
    "run_benchmark": "benchmark",
    "BenchmarkResult": "benchmark",
    "compare_results": "benchmark",
    "fit": "autofit",
    "Fitted": "autofit",
    "maximize": "batch_size",
    "Maximized": "batch_size",
    "longest_sequence": "sequence_length",
    "Longest": "sequence_length",
    "LengthPoint": "sequence_length",
    "BatchPoint": "batch_size",
    "LargerBatchWarning": "errors",
    "CkptplanError": "errors",
    "ConfigError": "errors",
    "BlockDeclarationError": "errors",
    "UnsupportedBoundaryError": "errors",
    "NoDifferentiableOutputError": "errors",
    "CompilerMissingError": "errors",
    "TimingOnlyProfileError": "errors",
    "InfeasibleTargetError": "errors",
    "PlanIncompatibleError": "errors",
    "StepMismatchError": "errors",
    "UnsupportedPlanVersionError": "errors",
    "PlannerScaleError": "errors",
    "SizeRefusedError": "errors",
    "DryRunError": "errors",
}

__all__ = [  # noqa: RUF022 - data-path order
    "CheckpointableBlock",
    "declare_blocks",
    "profile_blocks",
    "profile_model",
    "estimate_profile",
    "estimated_range",
    "EstimatedRange",
    "Calibration",
    "StageCost",
    "SelectiveOption",
    "OffloadOption",
    "CompiledOption",
    "BlockProfile",
    "RegionProfile",
    "ChainProfile",
    "plan_checkpoints",
    "Keep",
    "Recompute",
    "Selective",
    "Offload",
    "Compiled",
    "CompiledModel",
    "CheckpointDecision",
    "CheckpointPlan",
    "simulate_plan",
    "PlanCost",
    "check_plan",
    "plan_curve",
    "PlanCurve",
    "CurvePoint",
    "certify",
    "Certificate",
    "explain",
    "PlanExplanation",
    "BlockExplanation",
    "validate_plan",
    "apply_plan",
    "CheckpointedSequential",
    "checkpointed",
    "verify_plan",
    "VerifiedPeak",
    "check_equality",
    "EqualityCheck",
    "run_benchmark",
    "BenchmarkResult",
    "compare_results",
    "fit",
    "Fitted",
    "maximize",
    "Maximized",
    "longest_sequence",
    "Longest",
    "LengthPoint",
    "BatchPoint",
    "LargerBatchWarning",
    "CkptplanError",
    "ConfigError",
    "BlockDeclarationError",
    "UnsupportedBoundaryError",
    "NoDifferentiableOutputError",
    "CompilerMissingError",
    "TimingOnlyProfileError",
    "InfeasibleTargetError",
    "PlanIncompatibleError",
    "StepMismatchError",
    "UnsupportedPlanVersionError",
    "PlannerScaleError",
    "SizeRefusedError",
    "DryRunError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'ckptplan' has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"ckptplan.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
