"""What can be told of a run before it begins: its configuration, its syncs, its parts."""

from __future__ import annotations

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from isthmus.config import RunConfig, dump
from isthmus.models import outline
from isthmus.tools.grace_period import GracePeriod
from isthmus.tools.preflight import check_run, import_paths
from isthmus.tools.report import LINKS, readable_bytes
from isthmus.tools.sent_in_run import describe_sent
from isthmus.tools.sync_traffic import Uplink, readable_seconds, start_traffic, sync_traffic
from isthmus.train.assemble import build_model_spec


def show(config: RunConfig, console: Console, round_trip_ms: float = 0.0, step_seconds: float | None = None) -> None:
    """Print the resolved configuration, what each sync sends and takes, where each part is, and what does not fit."""
    print(yaml.safe_dump(dump(config), sort_keys=False))
    table = Table("fragment (synced together)", box=SIMPLE_HEAD)
    for column in ("sent", "bytes", "trips", *(f"modelled at\n{link:,} Mbit/s" for link in LINKS)):
        table.add_column(column, justify="right")
    model = outline(build_model_spec(config))
    traffic, start = sync_traffic(config, model), start_traffic(config, model)
    rows = dict(traffic)
    if start and config.outer.schedule:
        rows["gradients, in every step of the start"] = start.gradients
        rows[f"weights, every {config.outer.schedule.warm_start_every} steps of it"] = start.weights
    for fragment, own in rows.items():
        modelled = [readable_seconds(Uplink(link, round_trip_ms).seconds(own)) for link in LINKS]
        sent = own.sent_bytes
        table.add_row(fragment, readable_bytes(sent), f"{sent:,}", str(own.num_trips), *modelled)
    console.print(table)
    console.print(
        f"per sync, by each of {config.train.workers} workers; trips: one-way, one after the other; "
        f"round trip, modelled: {round_trip_ms:g} ms"
    )
    if config.train.workers == 1:
        console.print("one worker alone sends nothing: --workers 2 shows what two would send")
    else:
        num_params = sum(param.numel() for param in model.parameters())
        for sentence in describe_sent(config, num_params, traffic, start):
            console.print(sentence, soft_wrap=True)
    console.print(GracePeriod.of(config, model).describe(step_seconds), soft_wrap=True)
    table = Table("part", "import path", box=SIMPLE_HEAD)
    for part, path in import_paths(config).items():
        table.add_row(part, path)
    console.print(table)
    check_run(config)
