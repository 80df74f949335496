"""What runs would have taken on slower links: modelled from what was measured, and always called so."""

from __future__ import annotations

from collections import defaultdict

from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.tools.finished_run import FinishedRun


def modelled_clock(run: FinishedRun, megabits_per_second: float, step_seconds: float | None = None) -> list[float]:
    """Return the seconds after each inner step (first entry: the start) if every worker had an uplink of this speed.

    A step computes for `step_seconds`. The message of a sync takes 8 * sent_bytes / bandwidth on the uplink, which
    carries one message at a time. It leaves when the sync was sent, and training waits for its end where the sync was
    finished, `overlap_steps` later: what these steps of computing cannot hide is exposed.

    Not modelled: latency, downlinks, and what `ddp` hides of its all-reduce behind its own backward pass (all of it
    counts as exposed).

    Args:
        run: a finished one.
        megabits_per_second: speed of the uplink.
        step_seconds: computing per inner step; None: as measured in this run.
    """
    compute = run.step_seconds if step_seconds is None else step_seconds
    sent_after = _steps_of_sending(run)
    finished = defaultdict(list)
    for event in run.of("sync"):
        finished[event["step"]].append(event)
    clock, link_free = [0.0], 0.0
    for step in range(1, run.steps + 1):
        now = clock[-1] + compute
        for event in finished[step]:
            sent = sent_after.get(event["outer_step"], step)
            link_free = max(link_free, clock[sent] if sent < step else now)
            link_free += 8 * event["sent_bytes"] / (megabits_per_second * 1e6)
            now = max(now, link_free)
        clock.append(now)
    return clock


def modelled_utilisation(run: FinishedRun, megabits_per_second: float, step_seconds: float | None = None) -> float:
    """Return the share of the modelled time in which a worker computes; where it is 1 communication is free."""
    compute = run.step_seconds if step_seconds is None else step_seconds
    return run.steps * compute / modelled_clock(run, megabits_per_second, step_seconds)[-1]


def _steps_of_sending(run: FinishedRun) -> dict[int, int]:
    """Return the inner step after which each sync was sent, by its number, for those that the schedule sends."""
    if run.schedule is None:
        return {}
    schedule, sends = AdaptiveSchedule(run.schedule), list[int]()
    message_fractions = {
        event["step"]: event.get("message_fraction", event.get("effort", 1.0))
        for event in run.of("sync")
        if event["committed"]
    }
    for step in range(1, run.steps + 1):
        schedule.message_fraction = message_fractions.get(step, schedule.message_fraction)
        sends += [step] * len(schedule.begins(step))
        schedule.adapt(step)
    return dict(enumerate(sends))
