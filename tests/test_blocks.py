"""Declaring and finding blocks, calling them, and the fingerprint of what they compute with."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckptplan.blocks import (
    block_lists,
    call_block,
    declare_blocks,
    model_fingerprint,
    no_list_message,
    select_blocks,
    takes_keyword,
)
from ckptplan.errors import BlockDeclarationError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.single = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)


class TestDeclaring:
    def test_blocks_come_back_in_the_order_given(self) -> None:
        net = Net()
        blocks = declare_blocks(net, [("a", net.layers[1]), ("b", net.layers[0])])
        assert [(b.block_id, b.order) for b in blocks] == [("a", 0), ("b", 1)]
        assert blocks[0].module is net.layers[1]

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            (lambda net: [net.embed], r"block 0 is Linear.*expected a pair"),
            (lambda net: [("a", net.layers[0], 1)], r"expected a pair"),
            (lambda net: [("", net.layers[0])], r"has the id ''"),
            (lambda net: [(3, net.layers[0])], r"has the id 3"),
            (lambda net: [("a", net.layers[0]), ("a", net.layers[1])], r"'a' is used twice"),
            (lambda net: [("a", "layers.0")], r"'a' is a str; expected a torch.nn.Module"),
            (lambda net: [("a", nn.Linear(4, 4))], r"'a' is not a submodule of Net"),
            (lambda net: [("a", net.layers[0]), ("b", net.layers[0])], r"'b' is declared twice \(with 'a'\)"),
            (lambda net: [("a", net.layers[0]), ("b", net.layers[0][1])], r"'b' is declared twice|inside another"),
            (
                lambda net: [("a", net.layers[0][1]), ("b", net.layers[0])],
                r"'b' is inside another block or shares GELU",
            ),
        ],
    )
    def test_what_is_no_chain_of_distinct_submodules_is_refused_by_name(
        self, pairs: Callable[[Net], list], message: str
    ) -> None:
        net = Net()
        with pytest.raises(BlockDeclarationError, match=message):
            declare_blocks(net, pairs(net))

    def test_two_blocks_that_share_a_submodule_are_refused(self) -> None:
        shared = nn.Linear(4, 4)
        net = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])
        with pytest.raises(BlockDeclarationError, match="shares Linear"):
            declare_blocks(net, [("a", net[0]), ("b", net[1])])

    def test_one_activation_and_one_table_for_all_blocks_are_none_of_their_own(self) -> None:
        shared = nn.GELU(), nn.BatchNorm1d(4, affine=False)
        net = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), *shared) for _ in range(3))
        assert len(declare_blocks(net, [(str(i), block) for i, block in enumerate(net)])) == 3
        with pytest.raises(BlockDeclarationError, match="'b' is inside another block or shares GELU"):
            declare_blocks(net, [("a", shared[0]), ("b", net[0])])


class TestSelecting:
    def test_every_outermost_list_of_two_or_more_is_a_candidate(self) -> None:
        assert [path for path, _ in block_lists(Net())] == ["layers", "decoder"]
        assert block_lists(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))[0][0] == ""

    def test_what_no_block_covers_is_reported(self) -> None:
        assert select_blocks(Net(), ["layers.*"]).left_out == ("embed", "decoder.0", "decoder.1", "single.0", "head")

    def test_a_star_stands_for_one_name(self) -> None:
        selection = select_blocks(Net(), ["layers.*"])
        assert [b.block_id for b in selection.blocks] == ["layers.0", "layers.1", "layers.2"]

    def test_paths_keep_their_order_and_a_block_named_twice_is_one(self) -> None:
        selection = select_blocks(Net(), ["layers.2", "layers.*"])
        assert [b.block_id for b in selection.blocks] == ["layers.2", "layers.0", "layers.1"]

    def test_a_path_that_names_nothing_gets_the_nearest_and_the_quoted_form(self) -> None:
        with pytest.raises(BlockDeclarationError) as caught:
            select_blocks(Net(), ["layer.*"])
        assert "'layer.*' names no module of Net; nearest: layers.0" in str(caught.value)
        assert "'blocks.paths=[layers.*]'" in str(caught.value)

    def test_a_model_that_says_nothing_is_left_to_discovery(self) -> None:
        assert select_blocks(Net()) is None
        assert "'blocks.paths=[embed.*]'" in no_list_message(Net())

    def test_what_a_model_declares_wins_over_its_lists(self) -> None:
        class Declares(Net):
            def declared_blocks(self) -> list[tuple[str, nn.Module]]:
                return [("layers.1", self.layers[1])]

        selection = select_blocks(Declares())
        assert [b.block_id for b in selection.blocks] == ["layers.1"]
        assert selection.source == "what Declares declares"


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple = ()

    def forward(self, *args, mask=None, scale=1):
        self.seen = (args, mask, scale)
        return args


class TestCalling:
    Pair = namedtuple("Pair", "left right")

    @pytest.mark.parametrize(
        ("value", "args", "mask", "scale"),
        [
            (5, (5,), None, 1),
            ((5, 6), (5, 6), None, 1),
            ([5, 6], (5, 6), None, 1),
            (Pair(5, 6), (5, 6), None, 1),
            ({"mask": 7, "scale": 2}, (), 7, 2),
        ],
    )
    def test_a_sequence_is_spread_and_a_dict_gives_keywords(self, value, args, mask, scale) -> None:
        module = Recorder()
        call_block(module, value, {})
        assert module.seen == (args, mask, scale)

    def test_keywords_reach_only_blocks_that_take_them(self) -> None:
        module, plain = Recorder(), nn.Linear(2, 2)
        x = torch.ones(1, 2)
        call_block(module, 5, {"mask": 7, "unknown": 8})
        assert module.seen == ((5,), 7, 1)
        assert torch.equal(call_block(plain, x, {"mask": 7}), plain(x))
        assert takes_keyword(module, "mask")
        assert not takes_keyword(plain, "mask")


class TestFingerprint:
    def of(self, module: nn.Module) -> str:
        holder = nn.ModuleList([module])
        return model_fingerprint(declare_blocks(holder, [("b", module)]))

    def block(self, activation: nn.Module | None = None, dropout: float = 0.1) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), activation or nn.GELU(), nn.Dropout(dropout))

    def test_weights_are_no_part_of_it(self) -> None:
        left, right = self.block(), self.block()
        assert not torch.equal(left[0].weight, right[0].weight)
        assert self.of(left) == self.of(right)

    @pytest.mark.parametrize(
        "change",
        [
            lambda block: block.__setitem__(1, nn.ReLU()),
            lambda block: block[0].weight.requires_grad_(False),
            lambda block: block.eval(),
            lambda block: setattr(block[2], "p", 0.2),
            lambda block: setattr(block, "scale", 2.0),
            lambda block: block.register_buffer("table", torch.zeros(3)),
            lambda block: block.double(),
            lambda block: block.__setitem__(0, nn.Linear(4, 4, bias=False)),
            lambda block: block.append(nn.Identity()),
        ],
        ids=["class", "requires_grad", "train", "dropout", "attribute", "buffer", "dtype", "bias", "submodule"],
    )
    def test_everything_that_decides_the_computation_changes_it(self, change: Callable[[nn.Module], object]) -> None:
        block = self.block()
        before = self.of(block)
        change(block)
        assert self.of(block) != before

    def test_it_is_the_same_in_another_process(self) -> None:
        code = (
            "from torch import nn; from ckptplan.blocks import *\n"
            "block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1)); block.scorer = lambda x: x\n"
            "from types import SimpleNamespace; import threading\n"
            "block.table = {'k': 1}; block.thing = object()\n"
            "block.config = SimpleNamespace(act=nn.functional.gelu, names={'a', 'b', 'c'}, lock=threading.Lock())\n"
            "print(model_fingerprint(declare_blocks(nn.ModuleList([block]), [('b', block)])))"
        )
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
            for _ in range(2)
        ]
        assert len(runs[0].stdout.strip()) == 64
        assert runs[0].stdout == runs[1].stdout

    @pytest.mark.parametrize(
        "make",
        [
            lambda rate: {"dropout": rate},
            lambda rate: Settings(rate),
            lambda rate: SimpleNamespace(inner=SimpleNamespace(dropout=rate)),
            lambda rate: Plain(rate),
            lambda rate: Slotted(rate),
            lambda rate: functools.partial(F.dropout, p=rate),
            lambda rate: lambda x: F.dropout(x, rate),
            lambda rate: [{"dropout": rate}],
        ],
        ids=["dict", "dataclass", "namespace", "object", "slots", "partial", "closure", "nested"],
    )
    def test_a_setting_inside_an_object_changes_it(self, make: Callable[[float], object]) -> None:
        blocks = [self.block() for _ in range(3)]
        for block, rate in zip(blocks, (0.0, 0.3, 0.0), strict=True):
            block.config = make(rate)
        first, other, same = map(self.of, blocks)
        assert first != other
        assert first == same

    def test_caches_and_helpers_of_the_library_are_no_part_of_it(self) -> None:
        block = self.block()
        block.cache, block.lock, block.log = {}, threading.Lock(), logging.getLogger("a")
        before = self.of(block)
        block.cache[(8, "cpu")] = torch.ones(8)
        block.log.isEnabledFor(logging.DEBUG)  # it remembers the answer
        assert self.of(block) == before

    def test_a_holder_of_itself_ends(self) -> None:
        block = self.block()
        block.config = Plain(0.1)
        block.config.again = block.config
        block.config.owner = block
        assert self.of(block) == self.of(block)


@dataclass
class Settings:
    dropout: float


class Plain:
    def __init__(self, dropout: float) -> None:
        self.dropout = dropout


class Slotted:
    __slots__ = ("dropout",)

    def __init__(self, dropout: float) -> None:
        self.dropout = dropout
