"""Whether workers of several ranks learn what workers of one rank learn: two workers, every mesh, four recipes.

Each run is an `isthmus launch` of benchmarks/mesh.yaml over real processes (gloo). Elementwise methods must agree
within float tolerance; where a method sees shards (top-k, low rank, block scales) the table shows what that comes to:

    python -m benchmarks.mesh
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import write

CONFIG = Path(__file__).with_suffix(".yaml")
OUTPUT = Path("runs/mesh")
MESHES = {
    "one rank": [],
    "shard 2": ["mesh.shard=2"],
    "tp 2": ["mesh.tp=2"],
    "pp 2": ["mesh.pp=2"],
    "shard 2, pp 2": ["mesh.shard=2", "mesh.pp=2"],
}
RECIPES = ("diloco", "streaming", "sparseloco", "dilocox")


def launch(recipe: str, mesh: str) -> dict[str, Any]:
    """One run: its summary, and its training losses by step."""
    folder = OUTPUT / f"{recipe}-{mesh.replace(', ', '-').replace(' ', '-')}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "isthmus", "launch", str(CONFIG), "--workers", "2"]
    for value in (f"train.run_dir={folder}", f"outer.recipe={recipe}", *MESHES[mesh]):
        command += ["--set", value]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{recipe}, {mesh} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    events = [json.loads(line) for line in (folder / "metrics/worker-0.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in events if event["event"] == "step"}
    summary = json.loads((folder / "summary.json").read_text())
    print(f"{recipe:12} {mesh:14} loss {summary['eval_loss']:.5f}", flush=True)
    return {"recipe": recipe, "mesh": mesh, "summary": summary, "losses": losses}


def row(result: dict[str, Any], whole: dict[str, Any]) -> list[Any]:
    """A line of the table."""
    loss, reference = result["summary"]["eval_loss"], whole["summary"]["eval_loss"]
    apart = max(abs(result["losses"][step] / other - 1) for step, other in whole["losses"].items())
    hashes = set(result["summary"]["anchor_hash"].values())
    sent = max(result["summary"]["sent_bytes"])
    return [
        result["recipe"],
        result["mesh"],
        f"{loss:.5f}",
        f"{100 * (loss / reference - 1):+.3f} %",
        f"{100 * apart:.3f} %",
        "yes" if len(hashes) == 1 else "NO",
        f"{sent / max(whole['summary']['sent_bytes']):.3f}",
    ]


def main() -> None:
    """Run all, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    arguments = parser.parse_args()
    results, rows = [], []
    for recipe in arguments.recipes:
        whole = launch(recipe, "one rank")
        group = [whole, *(launch(recipe, mesh) for mesh in MESHES if mesh != "one rank")]
        results += group
        rows += [row(result, whole) for result in group]
    columns = ["recipe", "a worker's mesh", "evaluation loss", "against one rank", "training losses apart, at most",
               "anchors equal", "bytes, of one rank's"]  # fmt: skip
    notes = ["mesh.yaml: two workers, equal data; training losses: of worker 0, at every step"]
    write("mesh", "Workers of several ranks", columns, rows, notes, results)


if __name__ == "__main__":
    main()
