"""What runs would have taken on slower links: modelled from what was measured, and always called so."""

from __future__ import annotations

from collections import defaultdict

from isthmus.outer.adaptive_schedule import AdaptiveSchedule
from isthmus.tools.record import Record


def modelled_clock(record: Record, megabits_per_second: float, step_seconds: float | None = None) -> list[float]:
    """Seconds after each inner step (first entry: the start) if every worker had an uplink of this speed.

    A step computes for `step_seconds`. The message of a sync takes 8 * sent_bytes / bandwidth on the uplink, which
    carries one message at a time. It leaves when the sync was sent, and training waits for its end where the sync was
    finished, `overlap_steps` later: what these steps of computing cannot hide is exposed.

    Not modelled: latency, downlinks, and what `ddp` hides of its all-reduce behind its own backward pass (all of it
    counts as exposed).

    Args:
        record: the run.
        megabits_per_second: speed of the uplink.
        step_seconds: computing per inner step; None: as measured in this run.
    """
    compute = record.step_seconds if step_seconds is None else step_seconds
    sent_after = _steps_of_sending(record)
    finished = defaultdict(list)
    for event in record.of("sync"):
        finished[event["step"]].append(event)
    clock, link_free = [0.0], 0.0
    for step in range(1, record.steps + 1):
        now = clock[-1] + compute
        for event in finished[step]:
            sent = sent_after.get(event["outer_step"], step)
            link_free = max(link_free, clock[sent] if sent < step else now)
            link_free += 8 * event["sent_bytes"] / (megabits_per_second * 1e6)
            now = max(now, link_free)
        clock.append(now)
    return clock


def modelled_utilisation(record: Record, megabits_per_second: float, step_seconds: float | None = None) -> float:
    """Share of the modelled time in which a worker computes: steps * step_seconds / time. 1: communication is free."""
    compute = record.step_seconds if step_seconds is None else step_seconds
    return record.steps * compute / modelled_clock(record, megabits_per_second, step_seconds)[-1]


def _steps_of_sending(record: Record) -> dict[int, int]:
    """{number of a sync: inner step after which it was sent}, for those that the schedule sends."""
    if record.schedule is None:
        return {}
    schedule, sends = AdaptiveSchedule(record.schedule), list[int]()
    message_fractions = {
        event["step"]: event.get("message_fraction", event.get("effort", 1.0))
        for event in record.of("sync")
        if event["committed"]
    }
    for step in range(1, record.steps + 1):
        schedule.message_fraction = message_fractions.get(step, schedule.message_fraction)
        sends += [step] * len(schedule.begins(step))
        schedule.adapt(step)
    return dict(enumerate(sends))
