"""Two hosts on a slow link: tokens per second, bytes as the kernel counts them, loss; ours beside others' (as root).

    python -m benchmarks.wan --links A B

Link A is so slow that one float32 all-reduce of the model takes 50 inner steps, link B so that it takes 400: the rate
is set from a step's seconds, measured first. `ddp` is run for a few steps there, and once without a limit for its loss
after equal tokens. The link "free" has no limit: what is missing there is the recipes' own work. Runs already in the
output folder are not made again. Two runs of the same contender differ by about 1 %: `--repeats 5` makes five of each,
all contenders in turn.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.results import write
from benchmarks.wan.hosts import launch
from isthmus.recipes import load_config
from isthmus.train.assemble import build_model_spec

CONFIG = Path(__file__).with_name("wan.yaml")
OUTPUT = Path("runs/wan").absolute()
REFERENCES = ("nothing", "ddp")
COLUMNS = [
    "contender",
    "wire",
    "tokens/s per worker",
    "utilisation",
    "by processor time",
    "times as fast as ddp",
    "kB per step, by the kernel",
    "loss, equal tokens",
    "loss, equal wall-clock",
]
NOTES = [
    "2 workers, each a network namespace and one core; no warm start",
    "equal model, data, batch, inner and outer optimizer settings",
    "utilisation: against inner steps alone in the same process, just before and after; between two syncs, without the "
    "first round; ddp: all steps but the first. The machine's own speed drifts by 3 % meanwhile, so",
    "by processor time: the share of the same seconds that the training thread spent on inner steps, of the slower "
    "worker, over that of `nothing`; what drifts cancels out, what others' work does to the caches does not show",
    "equal wall-clock: when `nothing`, without communication, has done all its steps; ddp at equal tokens: on a link "
    "without a limit",
]


@dataclass(frozen=True)
class Contender:
    """Who takes part.

    Attributes:
        name: in the table.
        program: of `contenders.py`.
        wire: what crosses.
        overrides: of wan.yaml.
        matches: the recipe of ours that does the same, for contenders from elsewhere.
    """

    name: str
    program: str
    wire: str
    overrides: tuple[str, ...] = ()
    matches: str = ""


def ours(recipe: str, wire: str, *overrides: str, name: str = "") -> Contender:
    """One of our recipes."""
    return Contender(name or recipe, "ours", wire, (f"outer.recipe={recipe}", *overrides))


TAU = "outer.schedule.overlap_steps={tau}"
CONTENDERS = [
    Contender("nothing", "nothing", "-"),
    ours("ddp", "float32"),
    Contender("torchft DiLoCo", "torchft", "float32", ("outer.recipe=diloco",), "diloco"),
    ours("diloco", "float32"),
    Contender(
        "torchft DiLoCo, streaming", "torchft-streaming", "float32", ("outer.recipe=diloco",), "streaming, float32"
    ),
    ours("streaming", "float32", "outer.compressor={type: cast}", TAU, name="streaming, float32"),
    Contender("hivemind averaging", "hivemind", "float16", ("outer.recipe=diloco",), "opendiloco"),
    ours("opendiloco", "float16"),
    ours("streaming", "E3M0", TAU),
    ours("eager", "E3M0"),
    ours("dilocox", "rank 1/16, int4", "outer.compressor.compressor.rank=0.0625"),  # what long runs send
    ours("dct_momentum", "1/16, int8"),
    ours("sparseloco", "1/64, 2 bits", "outer.compressor.compressor.keep=64"),
    ours("muloco", "2 bits"),
]


@dataclass(frozen=True)
class Link:
    """A link.

    Attributes:
        name: A, B, ...
        ratio: inner steps that one float32 all-reduce takes on it; 0: it is not limited.
        local_steps: H.
        steps: of a run.
        ddp_steps: of the run of `ddp`.
    """

    name: str
    ratio: int
    local_steps: int
    steps: int
    ddp_steps: int

    def mbit(self, num_parameters: int, step_seconds: float) -> float:
        """Its rate; of two workers each sends as many bytes as the model has."""
        return 32e-6 * num_parameters / (self.ratio * step_seconds) if self.ratio else 0.0


FREE = Link("free", 0, 50, 300, 600)
LINKS = {"free": FREE, "A": Link("A", 50, 100, 400, 14), "B": Link("B", 400, 100, 300, 4)}


def run(contender: Contender, link: Link, mbit: float, number: int = 1) -> dict[str, Any]:
    """One run, the first or a repeat; what its workers wrote, and the figures made of it."""
    ddp = contender.name == "ddp"
    steps = link.ddp_steps if ddp else link.steps
    every = 1 if ddp and link.ratio else link.local_steps
    again = f"-{number}" if number > 1 else ""
    folder = OUTPUT / f"{link.name}-{contender.name.replace(', ', '-').replace(' ', '-')}{again}"
    overrides = [override.replace("{tau}", str(link.local_steps // 2 - 10)) for override in contender.overrides]
    overrides += [f"train.steps={steps}", f"outer.schedule.local_steps={link.local_steps}"]
    arguments = [contender.program, str(every), *overrides]
    workers = launch(folder, [mbit] * 2, lambda result: ["benchmarks.wan.worker", str(result), *arguments])
    marks, first = workers[0]["marks"], 0 if ddp else 1  # from one sync to another
    per_step = max(
        (worker["marks"][-1]["seconds"] - worker["marks"][first]["seconds"])
        / (worker["marks"][-1]["step"] - worker["marks"][first]["step"])
        for worker in workers
    )
    ceiling = max(sum(worker["step_seconds"]) / 2 for worker in workers)
    inner = max(
        (worker["marks"][-1]["inner_seconds"] - worker["marks"][first]["inner_seconds"])
        / (worker["marks"][-1]["seconds"] - worker["marks"][first]["seconds"])
        for worker in workers
    )
    sent = max((w["marks"][-1]["sent"] - w["marks"][first]["sent"]) for w in workers)
    print(
        f"{link.name} {contender.name:28} {100 * ceiling / per_step:6.2f} % {100 * inner:6.2f} %  "
        f"loss {marks[-1]['loss']:.4f}",
        flush=True,
    )
    return {
        "link": link.name,
        "contender": contender.name,
        "wire": contender.wire,
        "matches": contender.matches,
        "step_seconds": per_step,
        "ceiling_seconds": ceiling,
        "utilisation": ceiling / per_step,
        "inner_share": inner,
        "sent_per_step": sent / (marks[-1]["step"] - marks[first]["step"]),
        "marks": marks,
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The first of a contender's runs (all learn the same) with the median speed of all."""
    shares = [run["utilisation"] for run in runs]
    speed = {key: statistics.median(run[key] for run in runs) for key in ("step_seconds", "utilisation", "inner_share")}
    return {**runs[0], **speed, "utilisations": shares, "inner_shares": [run["inner_share"] for run in runs]}


def spread(result: dict[str, Any]) -> str:
    """Of the utilisation, where there are repeats."""
    shares = [100 * share for share in result["utilisations"]]
    return f" ({min(shares):.1f} to {max(shares):.1f})" if len(shares) > 1 else ""


def loss_at(result: dict[str, Any], seconds: float) -> str:
    """Of the newest mark before a time."""
    known = [mark["loss"] for mark in result["marks"] if mark["seconds"] <= seconds]
    return f"{known[-1]:.4f}" if known else "-"


def rows_of(results: list[dict[str, Any]], ddp_loss: dict[int, float]) -> list[list[Any]]:
    """The lines of one link."""
    nothing = next(result for result in results if result["contender"] == "nothing")
    ddp = next(result for result in results if result["contender"] == "ddp")
    clock, steps = nothing["marks"][-1]["seconds"], nothing["marks"][-1]["step"]
    rows = []
    for result in results:
        equal_tokens = ddp_loss.get(steps, float("nan")) if result is ddp else result["marks"][-1]["loss"]
        rows.append(
            [
                result["contender"],
                result["wire"],
                f"{1024 / result['step_seconds']:,.0f}",
                f"{100 * result['utilisation']:.1f} %{spread(result)}",
                f"{100 * result['inner_share'] / nothing['inner_share']:.2f} %",
                f"{result['utilisation'] / ddp['utilisation']:.1f}",
                f"{result['sent_per_step'] / 1e3:,.2f}",
                f"{equal_tokens:.4f}",
                loss_at(result, clock),
            ]
        )
    return rows


def compare(results: list[dict[str, Any]]) -> list[str]:
    """A line for every contender from elsewhere and our matching recipe."""
    lines = []
    for other in results:
        own = next((result for result in results if result["contender"] == other["matches"]), None)
        if own is None:
            continue
        lines.append(
            f"{own['contender']} is {own['utilisation'] / other['utilisation']:.2f} times as "
            f"fast as {other['contender']} ({other['wire']}), final loss {own['marks'][-1]['loss']:.4f} and "
            f"{other['marks'][-1]['loss']:.4f}"
        )
    return lines


def plot(link: Link, results: list[dict[str, Any]], path: Path) -> None:
    """Loss over wall-clock."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for index, result in enumerate(results):
        marks = result["marks"]
        axes.plot(
            [mark["seconds"] for mark in marks],
            [mark["loss"] for mark in marks],
            label=f"{result['contender']}, {result['wire']} ({100 * result['utilisation']:.1f} %)",
            color=plt.get_cmap("tab20")(index),
            marker=".",
        )
    axes.set(title=f"link {link.name}", xlabel="seconds", ylabel="evaluation loss of the anchor", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure a step, run what is missing, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--only", nargs="*", default=[], help="names of contenders; all when not given")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each on a link; the table has their median")
    parser.add_argument("--name", default="wan", help="of the results")
    arguments = parser.parse_args()
    chosen = [c for c in CONTENDERS if not arguments.only or c.name in (*REFERENCES, *arguments.only)]
    free = {contender.name: run(contender, FREE, 0) for contender in CONTENDERS if contender.name in REFERENCES}
    step_seconds = free["nothing"]["ceiling_seconds"]  # of an inner step
    model = build_model_spec(load_config(CONFIG, [])).build(0)
    num_parameters = sum(param.numel() for param in model.parameters())
    ddp_loss = {mark["step"]: mark["loss"] for mark in free["ddp"]["marks"]}
    for link in (LINKS[name] for name in arguments.links):
        mbit = link.mbit(num_parameters, step_seconds)
        found: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in chosen}
        for number in range(arguments.repeats):
            for contender in chosen:
                if number == 0 or contender.name != "ddp":  # minutes of waiting, always the same
                    found[contender.name].append(run(contender, link, mbit, number + 1))
        results = [middle(runs) for runs in found.values()]
        rate = f"{mbit:.2f} Mbit/s" if mbit else "without a limit"
        notes = [
            f"{rate}; {num_parameters:,} parameters; H = {link.local_steps}",
            f"an inner step takes {step_seconds * 1e3:.1f} ms",
            *compare(results),
            *([f"medians (and ranges) of {arguments.repeats} runs each"] if arguments.repeats > 1 else []),
        ]
        path = write(
            f"{arguments.name}-{link.name}",
            f"Link {link.name}",
            COLUMNS,
            rows_of(results, ddp_loss),
            notes + NOTES,
            results,
        )
        plot(link, results, path.with_suffix(".png"))
        print(path.read_text())


if __name__ == "__main__":
    main()
