"""The optimizer of every training stage: Muon for the matrices in blocks, AdamW for the rest.

Matrices of one shape are updated together as a stack. Every rank holds the whole state and updates
every parameter: gradients are summed over ranks before the step, so ranks stay equal. The stack is
the unit by which the work can be divided: a rank may own some of its matrices, since `_MuonStack`
never looks across them, and the saved state is keyed by parameter, not by rank.

Saved state, one tensor per key:

    step                          int64 scalar, steps taken; AdamW's bias correction needs it
    momentum/{parameter}          Muon, like the parameter, fp32
    second_moment/{parameter}     Muon, (rows, 1), or (1, columns) when wider than tall, fp32
    exp_avg/{parameter}           AdamW, like the parameter and in its dtype
    exp_avg_sq/{parameter}        AdamW, likewise
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanochat_core.config import OptimizerConfig
from nanochat_core.errors import ModelError
from nanochat_core.optim.adamw import adamw_
from nanochat_core.optim.groups import ADAMW_GROUPS, AdamWGroup, adamw_group
from nanochat_core.optim.muon import muon_, second_moment_shape
from nanochat_core.runtime.device import compute_dtype


@dataclass(frozen=True, kw_only=True)
class _MuonStack:
    """Matrices of one shape with their state, (N, R, C) and (N, R, 1) or (N, 1, C)."""

    names: list[str]
    parameters: list[nn.Parameter]
    momentum: Tensor
    second_moment: Tensor


@dataclass(frozen=True, kw_only=True)
class _AdamWList:
    """The parameters of one AdamW group with their state."""

    group: AdamWGroup
    lr: float
    names: list[str]
    parameters: list[nn.Parameter]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]


class Optimizer:
    """Updates a model's parameters from their gradients. The model must have its storage."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, *, precision: str) -> None:
        """`precision` ("fp32" or "bf16") is that of Muon's matrix products."""
        self._dtype = compute_dtype(precision)
        self._muon_lr = config.muon_lr
        self._num_steps = 0
        named = dict(model.named_parameters())
        muon = {name: p for name, p in named.items() if adamw_group(name) is None}
        shapes = sorted({p.shape for p in muon.values()})
        self._stacks = [
            _make_stack({name: p for name, p in muon.items() if p.shape == shape})
            for shape in shapes
        ]
        self._lists = [
            _make_list(
                group,
                getattr(config, group.lr),
                {name: p for name, p in named.items() if adamw_group(name) is group},
            )
            for group in ADAMW_GROUPS
        ]

    @torch.no_grad()
    def step(self, *, lr_multiplier: float, momentum: float, weight_decay: float) -> None:
        """One update from the gradients, which are then dropped.

        `lr_multiplier` scales every learning rate; `momentum` and `weight_decay` are Muon's.
        """
        self._num_steps += 1
        for stack in self._stacks:
            weights = torch.stack(list(stack.parameters))
            muon_(
                weights,
                torch.stack(_take_gradients(stack.parameters)),
                stack.momentum,
                stack.second_moment,
                lr=self._muon_lr * lr_multiplier,
                mu=momentum,
                weight_decay=weight_decay,
                dtype=self._dtype,
            )
            for parameter, weight in zip(stack.parameters, weights, strict=True):
                parameter.copy_(weight)
        for item in self._lists:
            adamw_(
                list(item.parameters),
                _take_gradients(item.parameters),
                item.exp_avg,
                item.exp_avg_sq,
                step=self._num_steps,
                lr=item.lr * lr_multiplier,
                group=item.group,
            )

    def state(self) -> dict[str, Tensor]:
        """The state by the keys above. The tensors are the optimizer's own, not copies."""
        return {"step": torch.tensor(self._num_steps)} | self._tensors()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state. Raises ModelError when keys or shapes are not this model's."""
        expected = self.state()
        for name in sorted(expected.keys() ^ state.keys()):
            fault = "lacks" if name in expected else "has an unknown entry"
            raise ModelError(f"the optimizer state {fault} {name}")
        for name, tensor in expected.items():
            if state[name].shape != tensor.shape:
                raise ModelError(
                    f"the optimizer state's {name} has shape {tuple(state[name].shape)}, "
                    f"the model needs {tuple(tensor.shape)}"
                )
        self._num_steps = int(state["step"])
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for stack in self._stacks:
            for i, name in enumerate(stack.names):
                result[f"momentum/{name}"] = stack.momentum[i]
                result[f"second_moment/{name}"] = stack.second_moment[i]
        for item in self._lists:
            for i, name in enumerate(item.names):
                result[f"exp_avg/{name}"] = item.exp_avg[i]
                result[f"exp_avg_sq/{name}"] = item.exp_avg_sq[i]
        return result


def _make_stack(named: dict[str, nn.Parameter]) -> _MuonStack:
    parameters = list(named.values())
    rows, cols = parameters[0].shape
    stack = (len(parameters), rows, cols)
    factored = (len(parameters), *second_moment_shape(rows, cols))
    device = parameters[0].device
    return _MuonStack(
        names=list(named),
        parameters=parameters,
        momentum=torch.zeros(stack, dtype=torch.float32, device=device),
        second_moment=torch.zeros(factored, dtype=torch.float32, device=device),
    )


def _make_list(group: AdamWGroup, lr: float, named: dict[str, nn.Parameter]) -> _AdamWList:
    parameters = list(named.values())
    return _AdamWList(
        group=group,
        lr=lr,
        names=list(named),
        parameters=parameters,
        exp_avg=[torch.zeros_like(p, requires_grad=False) for p in parameters],
        exp_avg_sq=[torch.zeros_like(p, requires_grad=False) for p in parameters],
    )


def _take_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    grads: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None, "a step needs every parameter's gradient"
        grads.append(parameter.grad)
        parameter.grad = None
    return grads
