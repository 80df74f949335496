"""Whether the parts of an outer loop go together."""

from isthmus.compress import Compressor
from isthmus.core import Fragment, SyncSchedule, UserError
from isthmus.outer.merge import Merge, Mix
from isthmus.transport.base import Transport


def check_parts(
    fragments: list[Fragment], schedule: SyncSchedule, compressor: Compressor, transport: Transport, merge: Merge
) -> None:
    """Raise a `UserError` where the parts of an outer loop do not go together."""
    if len(fragments) != schedule.num_fragments:
        raise UserError(
            f"the model is cut into {len(fragments)} fragments, the schedule expects {schedule.num_fragments}"
        )
    if isinstance(merge, Mix) and schedule.overlap_steps == schedule.local_steps:
        raise UserError("merge mix needs overlap_steps < local_steps; for a full delay use eager or keep_progress")
    if schedule.overlap_steps and not transport.limits.safe_to_overlap:
        raise UserError("this transport cannot run beside training: set overlap_steps to 0 or use the gloo backend")
    if transport.limits.elastic and not (merge.replicated and compressor.replicated):
        raise UserError(
            "workers that come and go need equal anchors; merge eager and compressor shared_momentum give every worker "
            "its own: use merge keep_progress, another compressor, or the transport torch_dist"
        )
