"""torchrun for the ranks of one worker, with the worker's own exit codes, which torchrun hides behind 1.

`python -m isthmus.tools.torchrun --standalone --nproc-per-node=4 -m isthmus train run.yaml`
"""

from __future__ import annotations

import signal
import sys

from isthmus.signals import STOPPED, heed_signals


def main() -> None:
    """Run torchrun; end with the code of the rank that failed first, or 75 where a signal stopped them all."""
    heed_signals()  # until torchrun does; as PID 1, too

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
    except SignalException as stopped:
        sys.exit(STOPPED if stopped.sigval in (signal.SIGTERM, signal.SIGINT) else 1)


if __name__ == "__main__":
    main()
