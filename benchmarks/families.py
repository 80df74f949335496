"""What the methods come to on every kind of model: the metric at equal steps, for all examples there are.

Each run is an `isthmus launch` of an example with another recipe; `alone` is one worker with its own share of the data.
Runs already in the output folder are not repeated, so the benchmark can be interrupted and grown:

    python -m benchmarks.families --workers 2 --only resnet wav2vec2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from benchmarks.models import examples
from benchmarks.results import write
from benchmarks.runs import launch, percent

OUTPUT = Path("runs")
METHODS = ("alone", "ddp", "diloco", "streaming", "dct_momentum", "sparseloco")
_ORDINARY = ("loss", "perplexity")  # what says least of a model that measures more


def metric(evaluation: dict[str, float]) -> str:
    """What a model is judged by: the first thing it measures beside its loss; else that."""
    return next((name for name in evaluation if name not in _ORDINARY), "loss")


def row(result: dict[str, Any], group: dict[str, dict[str, Any]]) -> list[Any]:
    """A line of the table, beside the other methods on the same example."""
    summary = result["summary"]
    evaluation, sent = summary["evaluation"], max(summary["sent_bytes"])
    name = metric(evaluation)

    def against(other: str) -> str:
        return percent(evaluation[name], group[other]["summary"]["evaluation"][name] if other in group else None)

    ddp = max(group["ddp"]["summary"]["sent_bytes"]) if "ddp" in group else 0
    hashes = set(summary["anchor_hash"].values())
    return [
        result["example"],
        result["method"],
        result["inside"],
        summary["steps"],
        f"{name} {evaluation[name]:.4f}",
        against("ddp"),
        against("diloco"),
        f"{evaluation['loss']:.4f}",
        f"{sent / 1e6:.2f}",
        f"{ddp / sent:,.1f}" if sent and ddp else "-",
        ("yes" if len(hashes) == 1 else "NO") if len(summary["anchor_hash"]) > 1 else "-",
    ]


def main() -> None:
    """Run what is missing, then write table and data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of examples; all when not given")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--name", default="families", help="of the results and of the folder in runs/")
    given = parser.parse_args()
    results, rows = list[dict[str, Any]](), list[list[Any]]()
    for example, path in examples(given.only).items():
        group = dict[str, dict[str, Any]]()
        for method in given.methods:
            recipe, workers = ("ddp", 1) if method == "alone" else (method, given.workers)
            folder = OUTPUT / given.name / f"{example}-{method}"
            summary = launch(path, folder, workers, [f"outer.recipe={recipe}", *given.set])
            inside = yaml.safe_load((folder / "config.yaml").read_text())["inner"]["optimizer"]["type"]
            group[method] = {"example": example, "method": method, "inside": inside, "summary": summary}
            print(f"{example:12} {method:14} {summary['evaluation']}", flush=True)
        results += group.values()
        rows += [row(result, group) for result in group.values()]
    title = "The methods on every kind of model: examples/*.yaml"
    columns = ["example", "method", "inside", "steps", "metric", "against ddp", "against diloco", "loss",
               "MB sent per worker", "times fewer than ddp", "anchors equal"]  # fmt: skip
    notes = [
        f"{given.workers} workers; `--set {' '.join(['outer.recipe=METHOD', *given.set])}`; "
        "equal steps and samples per worker, seed as in the example, one run each",
        "metric: what the model measures beside its loss, else its loss; of the anchor, on fixed validation samples",
        "inside: the inner optimizer that the recipe brings where the example names none",
        "alone: one worker on its own share of the data, without communication",
        "bytes: as counted where they are sent, warm start included",
    ]
    print(write(given.name, title, columns, rows, notes, results).read_text())


if __name__ == "__main__":
    main()
