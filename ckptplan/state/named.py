"""An optimizer whose state is saved under the names of the model's parameters, not under their numbers."""

from __future__ import annotations

from typing import Any

import torch

from ckptplan.state.objects import load_optimizer, plain_names, unwrap


class OptimizerByName:
    """Gives and takes an optimizer's state by parameter name; an item of a payload, and a template.

        states.save("step-100", {"model": model, "optimizer": OptimizerByName(model, optimizer)})

    What is stored does not depend on the order of the parameters, nor on how they are sharded: names are those of the
    plain module. Make it once the model is in its final form (wrapped, sharded) and before it runs.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for a parameter of the optimizer that is not one of the model."""
        self.model, self.optimizer = model, optimizer
        self._name_of: dict[int, str] = {}
        self.names()

    def names(self) -> list[str]:
        """Names of the optimizer's parameters, by their number in its own state."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self._name_of for parameter in parameters):
            named = plain_names(dict(unwrap(self.model).named_parameters()))
            self._name_of |= {id(parameter): name for name, parameter in named.items()}
        for number, parameter in enumerate(parameters):
            if id(parameter) not in self._name_of:
                what = f"parameter {number} of the optimizer, {list(parameter.shape)}"
                raise ValueError(f"{what}, is none of the model's; make the optimizer from the model's parameters")
        return [self._name_of[id(parameter)] for parameter in parameters]

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state with names where its own has numbers."""
        names, state = self.names(), self.optimizer.state_dict()
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
        return {"state": {names[number]: entry for number, entry in state["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes such a state. Raises ValueError where the names are not those of the optimizer."""
        numbers = {name: number for number, name in enumerate(self.names())}
        own = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        groups = []
        for group, mine in zip(state["param_groups"], own, strict=True):
            if {numbers.get(name) for name in group["params"]} != set(mine):
                raise ValueError("the state is of other parameters, or of the same in other groups")
            groups.append({**group, "params": mine})
        by_number = {numbers[name]: entry for name, entry in state["state"].items()}
        load_optimizer(self.optimizer, {"state": by_number, "param_groups": groups})
