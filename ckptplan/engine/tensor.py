"""Tensor parallelism: which matrices of a model are cut and how, and the cut itself by PyTorch's parallelize_module.

A model is cut twice: over the ranks that train it together, and, to be measured, over a mesh of the same shape that is
silent: its collectives take the memory that they take and exchange nothing. So each rank measures alone, on the
matrices, the buffers and the operators that it will train with.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ckptplan.config.wording import config_error
from ckptplan.data import Batch
from ckptplan.engine.ranks import Ranks
from ckptplan.errors import ConfigError
from ckptplan.proof import is_out_of_memory
from ckptplan.trees import local, whole
from ckptplan.twin import make_twin

if TYPE_CHECKING:  # these take time to import, which only runs with tensor parallelism spend
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# What a plan says of a matrix, in the words of transformers: "rep" is replicated, which whole inputs and outputs are.
STYLES = ("colwise", "rowwise", "colwise_rep", "rowwise_rep")
_MOST_NAMED = 3


def with_meshes(ranks: Ranks, device_type: str) -> Ranks:
    """``ranks`` with the meshes of tensor parallelism; every rank has to call it."""
    from torch.distributed.device_mesh import init_device_mesh

    if ranks.tensor_size > 1:
        shape = (ranks.data_size, ranks.tensor_size)
        ranks.mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))
        ranks.silent_mesh = _silent_mesh(ranks, device_type)
    return ranks


def _silent_mesh(ranks: Ranks, device_type: str) -> DeviceMesh:
    """A mesh of the ranks that share matrices with this one, which exchanges nothing: PyTorch's fake process group."""
    from torch.distributed.device_mesh import DeviceMesh

    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    first, found = ranks.rank - ranks.tensor_rank, None
    for start in range(0, ranks.size, ranks.tensor_size):  # every rank takes part in making every group
        group = dist.new_group(list(range(start, start + ranks.tensor_size)), backend="fake")
        found = group if start == first else found
    assert found is not None
    # A name of its own: of meshes that are equal, PyTorch's caches would give the collectives of the other one.
    return DeviceMesh.from_group(found, device_type, mesh_dim_names=("silent",))


def can_cut() -> bool:
    """Whether this torch cuts a model that every rank has whole without sending it around."""
    from torch.distributed.tensor.parallel import parallelize_module

    return "src_data_rank" in inspect.signature(parallelize_module).parameters


def styles_of(model: nn.Module, given: Mapping[str, str], num_ranks: int) -> dict[str, str]:
    """How each matrix that is cut over ``num_ranks`` is cut, by the path of its module.

    ``given``: of ``engine.tp_plan``, by path or pattern; None: what ``model.tensor_parallel_plan(num_ranks)`` says.

    Raises ``ConfigError`` where there is no such plan, or the model cannot be cut by it.
    """
    plan, source = _plan_of(model, given, num_ranks)
    found: dict[str, str] = {}
    modules = {path: module for path, module in model.named_modules() if path}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise _error(
                source,
                f"{pattern!r} is to be cut as {style!r}; there are {', '.join(STYLES)}",
                "'engine.tp_plan={layers.*.fc: colwise, layers.*.out: rowwise}'",
            )
        matching = [path for path in modules if fnmatch.fnmatchcase(path, pattern)]
        if not matching:
            raise _error(source, f"{pattern!r} matches no module of the model")
        found.update(dict.fromkeys(matching, style))
    uses: dict[int, list[str]] = {}
    for path, module in modules.items():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), []).append(path)
    for path, style in found.items():
        _require_cut(modules[path], path, style, num_ranks, source, uses)
    return found


def _plan_of(model: nn.Module, given: Mapping[str, str], num_ranks: int) -> tuple[dict[str, str], str]:
    if given:
        return dict(given), "engine.tp_plan"
    make, kind = getattr(model, "tensor_parallel_plan", None), getattr(model, "title", type(model).__name__)
    if make is None:
        problem = f"{kind} does not say which of its matrices are cut (it has no tensor_parallel_plan)"
        raise _error("engine.tp", problem, "'engine.tp_plan={layers.*.fc: colwise, layers.*.out: rowwise}'", num_ranks)
    try:
        return dict(make(num_ranks)), f"{kind}.tensor_parallel_plan"
    except ValueError as error:
        raise ConfigError(f"engine.tp={num_ranks}: {kind} cannot be cut: {error}") from error


def _require_cut(
    module: nn.Module, path: str, style: str, num_ranks: int, source: str, uses: Mapping[int, list[str]]
) -> None:
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        raise _error(source, f"{path} is a {type(module).__name__}; PyTorch cuts nn.Linear and nn.Embedding")
    if isinstance(module, nn.Embedding) and style == "rowwise":
        raise _error(source, f"{path} is an embedding, whose input is whole", f"{path}: rowwise_rep")
    by_rows = style.startswith("colwise") == isinstance(module, nn.Linear)  # a linear's weight is (out, in)
    size = module.weight.shape[0 if by_rows else 1]
    if size % num_ranks:
        raise _error(source, f"{path}.weight: {size} {'rows' if by_rows else 'columns'} are not shared evenly by "
                     f"{num_ranks} ranks")  # fmt: skip
    for parameter in module.parameters(recurse=False):
        others = [other for other in uses[id(parameter)] if other != path]
        if others:
            raise _error(source, f"{path} and {others[0]} share a weight, which a cut would part")


def _error(source: str, problem: str, remedy: str = "leave it out of the plan", num_ranks: int | None = None) -> Any:
    if num_ranks is not None:
        return config_error("engine.tp", num_ranks, problem, remedy=remedy)
    return ConfigError(f"{source}: {problem}\n  type: {remedy}")


def cut(model: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> nn.Module:
    """``model`` with its matrices cut over ``mesh``, in place; every rank has it whole, with the same values."""
    from torch.distributed.tensor.parallel import parallelize_module

    made: dict[str, ParallelStyle] = {path: _style(style) for path, style in styles.items()}
    return parallelize_module(model, mesh, made, src_data_rank=None)


def _style(name: str) -> ParallelStyle:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if name == "colwise":
        return ColwiseParallel()
    if name == "colwise_rep":
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel(input_layouts=Replicate()) if name == "rowwise_rep" else RowwiseParallel()


@dataclass(frozen=True)
class CutModel:
    """What belongs to a model that is cut.

    Attributes:
        silent: the same, cut over the silent mesh: to be measured on.
        sample: one sample of this rank, of which ``whole_loss`` is the loss of the model before it was cut.
        loss_fn: ``loss_fn(model, batch)``.
    """

    silent: nn.Module
    sample: Batch
    whole_loss: float
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]


def cut_model(
    model: nn.Module,
    given: Mapping[str, str],
    ranks: Ranks,
    batch: Batch,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
) -> CutModel:
    """Cut ``model`` in place over the ranks that share its matrices; nothing is exchanged.

    Args:
        given: as in ``styles_of``, which says what is raised.
        batch: of this rank, on the device of the model.
    """
    assert ranks.mesh is not None, "tensor parallelism has meshes"
    assert ranks.silent_mesh is not None, "tensor parallelism has meshes"
    styles = styles_of(model, given, ranks.tensor_size)
    sample = replace(batch, inputs=batch.inputs[:1], targets=batch.targets[:1])
    (twin,) = make_twin([model])
    with torch.no_grad():
        whole_loss = float(loss_fn(twin.eval(), sample))
    (twin,) = make_twin([model])
    silent = cut(twin, styles, ranks.silent_mesh)
    try:
        with torch.no_grad():
            loss_fn(silent, sample)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise _error(
            "engine.tp_plan" if given else "the model's plan",
            f"cut by it the model fails: {str(error).splitlines()[0]}",
            "pairs of matrices, the first colwise and the second rowwise",
        ) from error
    cut(model, styles, ranks.mesh["tp"])
    return CutModel(silent, sample, whole_loss, loss_fn)


def require_same(model: nn.Module, made: CutModel, ranks: Ranks, rtol: float) -> None:
    """Raise ``ConfigError`` where the cut model is another one than the whole; every rank has to call it.

    The loss of one sample is compared, and gradients of weights that every rank holds whole: where they are used on a
    part of the features each rank has a part of the gradient, and nobody adds these up.
    """
    (twin,) = make_twin([model])
    loss = made.loss_fn(twin.eval(), made.sample)
    loss.backward()
    found, expected = float(whole(loss.detach())), made.whole_loss
    is_other = not abs(found - expected) <= rtol * abs(expected)  # NaN too
    plain = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None and local(p) is p}
    norms = {name: float(gradient.double().norm()) for name, gradient in plain.items()}
    of_first = ranks.gather(norms)[ranks.rank - ranks.tensor_rank]
    apart = [name for name, norm in norms.items() if not abs(norm - of_first[name]) <= rtol * abs(of_first[name])]
    told = [figures for figures in ranks.gather((is_other, found, apart)) if figures[0] or figures[2]]
    if not told:
        return
    ranks.has_shared_error = True
    _, found, names = told[0]
    what = f"its loss is {found:.7g}, that of the whole model {expected:.7g}"
    if names:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        what = (
            f"gradients of {', '.join(names[:_MOST_NAMED])}{more}, which every rank holds whole, differ from rank to "
            "rank: they are used on a part of the features"
        )
    raise ConfigError(
        f"engine.tp={ranks.tensor_size}: the model as it is cut is another one: {what}. Cut matrices in pairs, by "
        "columns and then by rows, with nothing between them that mixes features or has weights (engine.tp_plan)"
    )
