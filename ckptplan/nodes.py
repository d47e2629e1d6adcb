"""The nodes of a plan: a tree over the chain of blocks, and its text. Torch-free.

A plan (``plan.py``) is such a tree with the reasons and the terms it was made for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptplan.graph import Output
from ckptplan.selective import names_outputs

# What runs a node, and the nodes that it runs.
CHECKPOINT, REPLAY, COMPILER, OFFLOAD = "checkpoint", "replay", "compiler", "offload"


@dataclass(frozen=True)
class Keep:
    """Run block ``block`` and keep what autograd saves. Text: ``K3``."""

    block: int


@dataclass(frozen=True)
class Recompute:
    """Keep the first child's input only; run the children again in backward. Text: ``R(4 5)``, ``R(4 R(5 6))``.

    PyTorch's non-reentrant checkpoint runs it. Children are Keep or Recompute nodes over consecutive blocks; one
    written as a bare number is ``Keep``.
    """

    children: tuple[PlanNode, ...]


@dataclass(frozen=True)
class Selective:
    """Keep the named outputs inside block ``block``; the others are made again. Text: ``S3[qkv,attention,fc]``.

    At the top level only. ``saved_ops`` are names as in ``selective.py``; none: ``S3[]`` keeps nothing inside, which
    is the other way to recompute a whole block.
    """

    block: int
    saved_ops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved_ops", tuple(self.saved_ops))


@dataclass(frozen=True)
class Offload:
    """Keep what autograd saves in block ``block`` on the host until its backward. Text: ``O3``.

    At the top level only.
    """

    block: int


@dataclass(frozen=True)
class Compiled:
    """Run block ``block`` compiled by torch.compile with this memory budget of its partitioner. Text: ``C3[0.5]``.

    At the top level only. ``budget`` is 0 to 1.
    """

    block: int
    budget: float


@dataclass(frozen=True)
class CompiledModel:
    """Run the model compiled as one graph with this memory budget: its blocks, 0 to ``blocks`` - 1, and what it runs
    around them. Text: ``C0-11[0.5]``.

    It stands alone in a plan. ``budget`` is 0 to 1.
    """

    blocks: int
    budget: float


PlanNode = Keep | Recompute | Selective | Offload | Compiled | CompiledModel


# The tree -------------------------------------------------------------------------------------------------------------


def blocks_of(nodes: Sequence[PlanNode]) -> tuple[int, ...]:
    """Block numbers under the nodes, left to right."""
    found: list[int] = []
    for node in nodes:
        if isinstance(node, Recompute):
            found.extend(blocks_of(node.children))
        elif isinstance(node, CompiledModel):
            found.extend(range(node.blocks))
        else:
            found.append(node.block)
    return tuple(found)


def compiled_model(nodes: Sequence[PlanNode]) -> CompiledModel | None:
    """The node that compiles the model as one graph; it stands alone."""
    return next((node for node in nodes if isinstance(node, CompiledModel)), None)


def recomputed_blocks(nodes: Sequence[PlanNode]) -> frozenset[int]:
    """Numbers of the blocks under a Recompute node: their code runs again in backward."""
    return frozenset(block for node in nodes if isinstance(node, Recompute) for block in blocks_of((node,)))


def wholly_again(nodes: Sequence[PlanNode]) -> frozenset[int]:
    """Numbers of the blocks all of which is made again in backward: recomputed ones, and ``S3[]``."""
    emptied = {node.block for node in nodes if isinstance(node, Selective) and not node.saved_ops}
    return recomputed_blocks(nodes) | emptied


def flat_nodes(recomputed: Sequence[bool]) -> tuple[PlanNode, ...]:
    """A flat plan: block i on its own, recomputed where ``recomputed[i]``."""
    return tuple(Recompute((Keep(i),)) if chosen else Keep(i) for i, chosen in enumerate(recomputed))


def tree_faults(nodes: Sequence[PlanNode], num_blocks: int) -> list[str]:
    """Everything that keeps ``nodes`` from being a plan over blocks 0 .. ``num_blocks`` - 1, one sentence each."""
    faults: list[str] = []
    _collect_node_faults(nodes, faults)
    whole = compiled_model(nodes)
    if whole is not None and (len(nodes) > 1 or whole.blocks != num_blocks):
        faults.append(
            f"{_node_text(whole)} compiles the model as one graph: it stands alone and names all its blocks, "
            f"0-{num_blocks - 1}"
        )
    if faults:
        return faults
    expected = 0
    for block in blocks_of(nodes):
        if block >= num_blocks:
            faults.append(f"block {block} is out of range: there are {num_blocks} blocks, 0 to {num_blocks - 1}")
        elif block < expected:
            faults.append(f"block {block} comes again or out of order; block {expected} was due")
        elif block > expected:
            faults.append(f"blocks {expected} to {block - 1} are missing before block {block}")
        expected = max(expected, block + 1)
    if expected < num_blocks:
        faults.append(f"blocks {expected} to {num_blocks - 1} are missing at the end")
    return faults


def _collect_node_faults(nodes: Sequence[PlanNode], faults: list[str]) -> None:
    for node in nodes:
        if isinstance(node, (Keep, Selective, Offload, Compiled)):
            if type(node.block) is not int or node.block < 0:
                faults.append(f"{type(node).__name__}({node.block!r}): expected a block number from 0 on")
            elif isinstance(node, Selective):
                faults += _selective_faults(node)
            elif isinstance(node, Compiled) and not _is_share(node.budget):
                faults.append(f"Compiled({node.block}, {node.budget!r}): expected a budget from 0.0 to 1.0")
        elif isinstance(node, CompiledModel):
            if type(node.blocks) is not int or node.blocks < 1 or not _is_share(node.budget):
                faults.append(f"{node!r}: expected a number of blocks from 1 on and a budget from 0.0 to 1.0")
        elif isinstance(node, Recompute):
            if not node.children:
                faults.append("R() recomputes nothing; it needs at least one block")
            elif len(node.children) == 1 and isinstance(node.children[0], Recompute):
                faults.append(
                    f"{_node_text(node)} wraps a recomputation in another; write {_node_text(node.children[0])}"
                )
            inside = [child for child in node.children if not isinstance(child, (Keep, Recompute))]
            inside = [child for child in inside if isinstance(child, PlanNode)]
            faults += [f"{_node_text(child)} stands inside a recomputation; it may at the top only" for child in inside]
            _collect_node_faults(node.children, faults)
        else:
            faults.append(
                f"{node!r} is no node that this version knows; expected Keep, Recompute, Selective, Offload, "
                "Compiled or CompiledModel"
            )


def _is_share(budget: object) -> bool:
    return isinstance(budget, float) and 0 <= budget <= 1


def _selective_faults(node: Selective) -> list[str]:
    wrong = [n for n in node.saved_ops if not isinstance(n, str) or not n or set(n) & set(",[] \t\n")]
    faults = [f"S{node.block}: {name!r} is no name of an output" for name in wrong]
    if len(set(node.saved_ops)) < len(node.saved_ops):
        faults.append(f"S{node.block}[{','.join(node.saved_ops)}]: a name stands twice")
    return faults


def executors_of(nodes: Sequence[PlanNode]) -> dict[int, str]:
    """What runs each block that is not kept."""
    found: dict[int, str] = {}
    for node in nodes:
        if isinstance(node, Recompute):
            found |= dict.fromkeys(blocks_of((node,)), CHECKPOINT)
        elif isinstance(node, Selective):
            found[node.block] = REPLAY
        elif isinstance(node, Offload):
            found[node.block] = OFFLOAD
        elif isinstance(node, (Compiled, CompiledModel)):
            found |= dict.fromkeys(blocks_of((node,)), COMPILER)
    return found


def saved_faults(node: Selective | None, saved_ops: Sequence[str] | None) -> list[str]:
    """Each name of the node must stand for outputs that the decision saves, and for all of them together."""
    if node is None or saved_ops is None:
        return []
    unclear = [name for name in saved_ops if not Output.is_name(name)]
    if unclear:
        return [
            f"{name!r} is no full name of an output (<submodule path>.<operator>#<n-th call>:<output>); make the plan "
            "with a profile that knows the short ones"
            for name in unclear
        ]
    if names_outputs(node.saved_ops, saved_ops):
        return []
    return [f"the tree keeps [{', '.join(node.saved_ops)}] but saved_ops is [{', '.join(saved_ops)}]"]


# Text -----------------------------------------------------------------------------------------------------------------


def nodes_text(nodes: Sequence[PlanNode]) -> str:
    """The text of a plan: ``K0 R(1) R(2 R(3 4))``."""
    return " ".join(_node_text(node) for node in nodes)


def _node_text(node: PlanNode) -> str:
    if isinstance(node, Keep):
        return f"K{node.block}"
    if isinstance(node, Selective):
        return f"S{node.block}[{','.join(node.saved_ops)}]"
    if isinstance(node, Offload):
        return f"O{node.block}"
    if isinstance(node, Compiled):
        return f"C{node.block}[{node.budget!r}]"
    if isinstance(node, CompiledModel):
        return f"C0-{node.blocks - 1}[{node.budget!r}]"
    inner = (str(child.block) if isinstance(child, Keep) else _node_text(child) for child in node.children)
    return f"R({' '.join(inner)})"


_TOKEN = re.compile(
    r"\s*(?:(?P<keep>K)?(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?(?=[\s()]|$)|(?P<open>R\()|(?P<close>\)))"
    r"|\s*S(?P<selective>[0-9]+)\[(?P<names>[^\s\[\]]*)\](?=[\s()]|$)"
    r"|\s*O(?P<offload>[0-9]+)(?=[\s()]|$)"
    r"|\s*C(?P<compiled>[0-9]+)(?:-(?P<last_compiled>[0-9]+))?\[(?P<budget>[0-9]+(?:\.[0-9]*)?(?:e-[0-9]+)?)\](?=[\s()]|$)"
)

_MAX_RANGE = 1_000_000


def parse_plan_text(text: str) -> tuple[PlanNode, ...]:
    """Nodes from text. ``K0`` keeps block 0, ``K0-3`` keeps four; ``R(1)`` recomputes one, ``R(4-7)`` a segment.

    ``S2[qkv,fc]`` keeps two outputs inside block 2, ``O4`` keeps what block 4 saves on the host, ``C3[0.5]`` runs block
    3 compiled, ``C0-11[0.5]`` the whole model of 12 blocks as one graph. Inside ``R(...)`` a bare number is a block of
    the segment and another ``R(...)`` a nested recomputation.
    Raises ``ValueError`` that shows the place, what was found there and what is allowed.
    """
    if not isinstance(text, str):
        raise TypeError(f"plan text is a {type(text).__name__}; expected text such as 'K0 R(1) R(2 3)'")
    levels: list[list[PlanNode]] = [[]]
    opened_at: list[int] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise _text_error(text, position, depth=len(opened_at))
        if match["first"] is not None:
            if match["keep"] is None and not opened_at:
                raise _text_error(text, position, depth=0)
            levels[-1].extend(_keep_range(text, match))
        elif match["selective"] is not None:
            names = tuple(match["names"].split(",")) if match["names"] else ()
            levels[-1].append(Selective(int(match["selective"]), names))
        elif match["offload"] is not None:
            levels[-1].append(Offload(int(match["offload"])))
        elif match["compiled"] is not None:
            levels[-1].append(_compiled_node(text, match))
        elif match["open"]:
            opened_at.append(match.start("open"))
            levels.append([])
        elif not opened_at:
            raise _text_error(text, position, depth=0)
        else:
            opened_at.pop()
            children = tuple(levels.pop())
            levels[-1].append(Recompute(children))
        position = match.end()
    if opened_at:
        raise ValueError(f"plan text: 'R(' is not closed\n{_pointer(text, opened_at[-1])}")
    if not levels[0]:
        raise ValueError("plan text is empty; expected nodes such as 'K0 R(1) R(2 3)'")
    return tuple(levels[0])


def _compiled_node(text: str, match: re.Match[str]) -> PlanNode:
    first, budget = int(match["compiled"]), float(match["budget"])
    if match["last_compiled"] is None:
        return Compiled(first, budget)
    if first > 0:
        raise ValueError(
            "plan text: a range stands for the whole model compiled as one graph, so it begins at block 0\n"
            f"{_pointer(text, match.start('compiled'))}"
        )
    return CompiledModel(int(match["last_compiled"]) + 1, budget)


def _keep_range(text: str, match: re.Match[str]) -> list[PlanNode]:
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    if last < first:
        raise ValueError(f"plan text: range {first}-{last} does not ascend\n{_pointer(text, match.start('first'))}")
    if last - first >= _MAX_RANGE:
        where = _pointer(text, match.start("first"))
        raise ValueError(f"plan text: range {first}-{last} is too large; at most {_MAX_RANGE:,} blocks\n{where}")
    return [Keep(block) for block in range(first, last + 1)]


def _text_error(text: str, position: int, *, depth: int) -> ValueError:
    position += len(text[position:]) - len(text[position:].lstrip())
    word = text[position:].split(maxsplit=1)[0]
    allowed = (
        "a block number, a range like 4-7, 'R(' or ')'"
        if depth
        else "K<block>, K<first>-<last>, R(...), S<block>[...], O<block> or C<block>[<budget>]"
    )
    return ValueError(
        f"plan text: found {word!r} at position {position}; expected {allowed}\n{_pointer(text, position)}"
    )


def _pointer(text: str, position: int) -> str:
    start = max(0, position - 40)
    return f"  {text[start : position + 40]}\n  {' ' * (position - start)}^"
