"""A schedule of syncs whose round length follows what is worth sending."""

from dataclasses import dataclass, field, replace

from isthmus.core import State, SyncSchedule


@dataclass
class AdaptiveSchedule:
    """A schedule whose H may change between two rounds (DiLoCoX, arXiv 2506.21263: H_t = H_1 r_t / r_1).

    Steps are those of the run. As the rank, and with it the message, shrinks, rounds become shorter in proportion: the
    link is as busy as before, and workers part less.
    """

    planned: SyncSchedule  # the schedule as configured; holds until the first change
    message_fraction: float = 1.0  # size of the messages of the last committed sync over that of the largest
    schedule: SyncSchedule = field(init=False)  # of the present round
    _offset: int = 0  # steps of the run minus steps of the present round's schedule

    def __post_init__(self) -> None:
        self.schedule = self.planned

    def begins(self, step: int) -> list[int]:
        """Return the fragments that are sent after a step of the run, as `SyncSchedule.begins` does."""
        return self.schedule.begins(step - self._offset)

    def finishes(self, step: int) -> list[int]:
        """Return the fragments whose sync is due after a step of the run, as `SyncSchedule.finishes` does."""
        return self.schedule.finishes(step - self._offset)

    def blocking(self, step: int) -> bool:
        """Whether what begins after a step of the run must also finish there."""
        return self.schedule.blocking(step - self._offset)

    def warm(self, step: int) -> bool:
        """Whether a step of the run belongs to the synchronous start."""
        return self.schedule.warm(step - self._offset)

    def round_steps(self, step: int) -> int:
        """Return the length of the round that is finished at `step`."""
        if not self.warm(step):
            return self.schedule.local_steps
        return (step - 1) % self.planned.warm_start_every + 1  # the last of a start may be shorter

    def adapt(self, step: int) -> None:
        """Make a round that begins after `step` as long as the messages are large."""
        local_steps = max(1, round(self.planned.local_steps * self.message_fraction))
        fixed = self.planned.num_fragments > 1 or local_steps == self.schedule.local_steps
        if fixed or self.warm(step) or not self.begins(step):
            return
        delayed = self.planned.overlap_steps == self.planned.local_steps
        overlap_steps = local_steps if delayed else min(self.planned.overlap_steps, local_steps)
        self.schedule = replace(self.planned, local_steps=local_steps, overlap_steps=overlap_steps)
        self._offset = step - self.planned.warm_start_steps - local_steps

    def state_dict(self) -> State:
        """Return where the present round stands."""
        return {
            "local_steps": self.schedule.local_steps,
            "overlap_steps": self.schedule.overlap_steps,
            "offset": self._offset,
            "message_fraction": self.message_fraction,
        }

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from where a saved state stands."""
        steps = {name: state_dict[name] for name in ("local_steps", "overlap_steps")}
        self.schedule = replace(self.planned, **steps)
        self._offset, self.message_fraction = state_dict["offset"], state_dict["message_fraction"]
