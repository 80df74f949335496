"""The state of one rank: what a checkpoint holds of it, and back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from torch import nn

from isthmus.core import State
from isthmus.inner import AdversarialStep, SupervisedStep
from isthmus.parallel.state import load_local_model, local_state, named_tensors, sharded_optimizer_state
from isthmus.train import random_state
from isthmus.train.lifecycle import Lifecycle
from isthmus.train.method import Method
from isthmus.train.metrics import Totals
from isthmus.train.process import Process
from isthmus.train.reshard import RankParts


@dataclass
class WorkerState:
    """All that changes while a rank trains; `model` is this rank's part of it."""

    run_seed: int
    process: Process
    model: nn.Module
    inner_step: SupervisedStep | AdversarialStep
    method: Method
    lifecycle: Lifecycle
    totals: Totals = field(default_factory=Totals)

    def state_dict(self) -> State:
        """Return the state after the present step; tensors are live, not copies."""
        method = self.method.state_dict()
        return {
            "holding": asdict(RankParts.of(self.model, self.inner_step.optimizer, self.method.param_names)),
            "model": local_state(named_tensors(self.model)),
            "method": method,
            "inner_step": local_state(self.inner_step.state_dict()),
            "stream": self.lifecycle.batches_state(method),
            "generators": random_state.save(),
            "totals": asdict(self.totals),
        }

    def load_state_dict(self, state: State, step: int) -> None:
        """Go on from what was saved after `step`."""
        load_local_model(self.model, state["model"])
        self.load_own(state)
        self.lifecycle.batches.load_state_dict(state["stream"])
        if "generators" in state:
            random_state.load(state["generators"])
        else:  # the ranks were others
            random_state.seed(self.run_seed + step, self.process.dropout_seed)
        self.method.load_state_dict(state["method"])  # last: it sends again what was in flight

    def load_own(self, state: State) -> None:
        """Take only what no other worker has: the inner optimizer, and what this worker has counted."""
        optimizer = sharded_optimizer_state(self.inner_step.optimizer, state["inner_step"]["optimizer"])
        self.inner_step.load_state_dict({**state["inner_step"], "optimizer": optimizer})
        self.totals = Totals(**state["totals"])
