"""Running a block compiled by torch.compile, with a memory budget of its own for the compiler's partitioner.

``torch._functorch.config.activation_memory_budget`` is read once, when a graph is compiled, and nothing guards on it:
Dynamo would hand a block the graph that another block of its class got under another budget. So each budget has a
backend function of its own, which sets it, and each kind of block under each budget has a code object of its own, which
is where Dynamo keeps graphs. Blocks of one kind share both: twelve equal blocks are compiled once per budget.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckptplan.blocks import describe_module
from ckptplan.errors import CompilerMissingError

Forward = Callable[..., Any]  # (module, *args, **kwargs) -> what the module's forward returns


def require_compiler(device: torch.device) -> None:
    """Raise ``CompilerMissingError`` unless torch.compile can make code for ``device`` on this machine."""
    if device.type == "cpu":
        from torch._inductor import cpp_builder, exc  # seconds; who does not compile goes without

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as error:
            raise CompilerMissingError(
                "compiled blocks need a C++ compiler, and none was found; install one (apt install g++), or name it in "
                "the environment variable CXX, or take an eager planner (planner=dp, planner=optimal)"
            ) from error
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            raise CompilerMissingError(
                f"compiled blocks on {device} need Triton, and it was not found; install it (pip install triton), or "
                "take an eager planner (planner=dp, planner=optimal)"
            )


class CompiledBlock:
    """Stands for a block's own forward: ``compiled_block(*args, **kwargs)``.

    Without gradients the block runs as it is. It is compiled at the first call with each new shape; a graph break is an
    error of Dynamo's. Copies and pickles without its compiled code.

    Raises ``RuntimeError`` at more different shapes than ``torch._dynamo.config.recompile_limit``.
    """

    def __init__(self, module: nn.Module, budget: float) -> None:
        self.module, self.budget = module, budget
        self._kind = describe_module(module, exact=True)  # before anything stands on the module as its forward
        self._run: Forward | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(self.module).forward(self.module, *args, **kwargs)
        try:
            if self._run is not None:
                return self._run(self.module, *args, **kwargs)
            self._run = _compiled(type(self.module).forward, self._kind, self.budget)
            with _without_warnings_of_torch():
                return self._run(self.module, *args, **kwargs)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # importing the class takes seconds
                raise
            raise RuntimeError(
                f"a planned {type(self.module).__name__} was called with more different shapes than torch.compile "
                f"keeps graphs for ({torch._dynamo.config.recompile_limit}); pad batches to fewer shapes, raise "
                "torch._dynamo.config.recompile_limit, or take an eager planner"
            ) from error

    @property
    def was_called(self) -> bool:
        """Whether it has run with gradients, and so compiled."""
        return self._run is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}


@contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """Its compiler uses what it deprecates itself and looks at gradients of inner values; no user can act on that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def called_as(block: CompiledBlock | None) -> Iterator[None]:
    """The block's module has this in place of its forward meanwhile, so that a call of it runs its hooks too."""
    if block is None:
        yield
        return
    block.module.forward = block
    try:
        yield
    finally:
        del block.module.forward


@functools.cache
def _compiled(forward: Forward, kind: str, budget: float) -> Forward:
    """``forward`` compiled, with a code object of its own."""

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    code = run.__code__.replace(co_name=f"{forward.__qualname__.replace('.', '_')}_{len(kind)}_{budget}")
    own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    return torch.compile(own, backend=_backend(budget), dynamic=False, fullgraph=True)


@functools.cache
def _backend(budget: float) -> Callable[..., Any]:
    with _without_warnings_of_torch():
        from torch._functorch import config as partitioner
        from torch._inductor import config as code
        from torch._inductor.compile_fx import compile_fx

    def compile_with_budget(graph: Any, inputs: Any) -> Any:
        # half precision is rounded where the plain model rounds it
        with partitioner.patch(activation_memory_budget=budget), code.patch(emulate_precision_casts=True):
            return compile_fx(graph, inputs)

    return compile_with_budget
