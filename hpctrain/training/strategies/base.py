"""What the loop asks of the way in which the ranks share the work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hpctrain.cluster import Ranks
from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.algorithms import Algorithm
from hpctrain.training.data.plan import Deal
from hpctrain.training.module import Module
from hpctrain.training.optimization import Optimization, toggled

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings

#: A strategy for several ranks brings their gradients together in one of these.
_SHARING = frozenset({"place", "training_step", "backward", "before_update", "optimized", "__init__"})
_TORCHS_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class Strategy:
    """One rank that trains alone; what others do differently, they override.

    A strategy puts the module on this rank's device, and sees to it that before an update every parameter
    has its gradient: the mean over the ranks among which the data is dealt.

    Attributes:
        module: what is trained; its parameters may have become parts of themselves.
        team: the ranks.
        in_lockstep: whether ranks wait for each other in every forward pass, also without a backward pass.
        has_turns: whether a step may be for some parameters only.
        has_algorithms: whether replicas may agree in another way than by an all-reduce.
        has_buckets: whether gradients are sent in parts of a size that one may set.
        algorithm: how they do.
        spawns: whether the process that calls `fit` starts the ranks, where nobody has.
        turn: index of the optimizer that the step is for, where optimizers take turns.
        one_process: whether one process computes on all devices.
        splits_itself: whether it makes micro-batches of a rank's samples itself.
        remarks: what the user is told at the start, in sentences without a full stop.
    """

    in_lockstep: ClassVar[bool] = False
    has_turns: ClassVar[bool] = True
    has_algorithms: ClassVar[bool] = False
    has_buckets: ClassVar[bool] = False
    spawns: ClassVar[bool] = False
    one_process: ClassVar[bool] = False
    splits_itself: ClassVar[bool] = False
    remarks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, module: Module, team: Team, settings: Settings) -> None:
        """Put `module` on this rank's device. All ranks must call this.

        Raises:
            UserError: it cannot be trained in this way.
        """
        if team.is_distributed and not any(vars(kind).keys() & _SHARING for kind in type(self).__mro__[:-2]):
            raise UserError(
                f"strategy {settings.strategy!r} ({type(self).__name__}) overrides none of "
                f"{', '.join(sorted(_SHARING))}, so that each of the {team.ranks.world_size} ranks would "
                "train alone. Override what brings their gradients together, or derive it from one of ours."
            )
        self.module, self.team, self.settings = module, team, settings
        self.algorithm: Algorithm | None = None
        self.turn: tuple[int, ...] = ()
        self._turns: Sequence[Sequence[torch.Tensor]] = ()
        self.place()

    @classmethod
    def check(cls, settings: Settings) -> None:
        """Look whether the settings go with this strategy, before anything is begun.

        Raises:
            UserError: they do not; the message says why.
        """

    @classmethod
    def deal(cls, ranks: Ranks) -> Deal:
        """Among how many the samples are dealt, and which part is this rank's."""
        return Deal(ranks.rank, ranks.world_size)

    def place(self) -> None:
        """Move the module to this rank's device."""
        self.module.to(self.team.device)

    def gradient_parts(self) -> list[int]:
        """Bytes of each part in which gradients are sent; empty where that is not known."""
        return []

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        """The module's training step, through whatever synchronises gradients.

        Args:
            batch: this rank's samples, or one that is not its own where it has none.
            batch_idx: number of the global batch in its epoch, from 0.
            num_samples: this rank's samples.

        Returns:
            What `training_step_end` returned, and the number of samples that it stands for.
        """
        output = self.module.training_step(batch, batch_idx, *self.turn)
        return self.module.training_step_end(output), num_samples

    def trial_step(self, batch: Any) -> Any:
        """The module's training step on this rank alone, to see whether it fits into memory."""
        return self.module.training_step_end(self.module.training_step(batch, 0, *self.turn))

    def take_turns(self, parameters: Sequence[Sequence[torch.Tensor]]) -> None:
        """Make ready for steps that are for one optimizer each. All ranks must call this.

        Args:
            parameters: those of each optimizer, before `optimized` may have put others in their place.

        Raises:
            UserError: the strategy cannot let a part of the parameters rest.
        """
        if self.team.is_distributed and not self.has_turns:
            raise UserError(
                f"training_step takes optimizer_idx, but optimizers cannot take turns with strategy "
                f"{self.settings.strategy!r}, in which all parameters go through a step together. "
                "Take 'ddp' or 'zero1', or return one loss for all optimizers."
            )
        self._turns = parameters

    @contextmanager
    def turn_of(self, idx: int) -> Iterator[None]:
        """Steps meanwhile are for one optimizer: only its parameters take a gradient."""
        self.turn = (idx,)
        try:
            with toggled(self.module, self._turns[idx]):
                yield
        finally:
            self.turn = ()

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients those of `loss`, which `training_step` returned and which was weighted."""
        torch.autograd.backward(loss)

    def accumulating(self) -> AbstractContextManager[None]:
        """Forward and backward passes meanwhile are not the last ones before an update."""
        return nullcontext()

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, int]:
        """Call a method of the module that takes no gradient, such as `validation_step`.

        Args:
            method: its name.
            batch: this rank's samples, or others where it has none.
            batch_idx: number of the batch.
            num_samples: this rank's samples.

        Returns:
            What it returned, and the number of samples that it stands for.
        """
        return getattr(self.module, method)(batch, batch_idx), num_samples

    def optimized(self, optimization: Optimization) -> Optimization:
        """The optimizers and schedules to train with, made of those of the module."""
        return optimization

    def before_update(self) -> None:
        """Complete the gradients, before anybody looks at them; once for every update or more often."""

    def gradient_norm(self, parameters: Iterable[torch.Tensor], p: float = 2.0) -> torch.Tensor:
        """The norm of all gradients taken together, on all ranks alike. All ranks must call this.

        Args:
            parameters: those of the optimizers.
            p: which norm; infinity for the largest absolute value.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type=p).to(self.team.device)

    def updated(self, step: int) -> None:
        """All optimizers have made their update of `step`, counted from 1. All ranks call this."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of what an optimizer updates."""
        if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not _TORCHS_ZERO_GRAD:
            optimizer.zero_grad(set_to_none=True)
            return
        # What torch's own does, without its notes for a profiler, which take some microseconds.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def align_buffers(self) -> None:
        """Make the module's buffers equal on all ranks, before it is validated or saved."""

    def finish(self) -> str | None:
        """Leave the module whole, at the end of the training. All ranks must call this.

        Returns:
            A sentence for the user where that cannot be done.
        """
        return None
