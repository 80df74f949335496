"""A sheet of what the averaged generator of a BigGAN run draws: a row a class.

python examples/biggan_sheet.py runs/biggan
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

from isthmus.parallel.state import load_local_model
from isthmus.recipes import load_config
from isthmus.train.assemble import build_model_spec
from isthmus.train.checkpoint import Checkpoints

COLUMNS = 12
MOST_ROWS = 20


def draw(run: Path) -> torch.Tensor:
    """Images [rows, columns, channels, size, size] from 0 to 1, of the newest checkpoint of worker 0."""
    spec = build_model_spec(load_config(run / "config.yaml"))
    model = spec.build()
    newest = max((run / "checkpoints").glob("step-*/worker-0"))
    state = Checkpoints(run / "checkpoints", 0, {}).load(int(newest.parent.name.removeprefix("step-")))
    load_local_model(model, state["model"])
    torch.manual_seed(0)
    num_rows = min(spec.num_classes, MOST_ROWS)
    generator = model.averaged_generator(torch.randint(spec.num_classes, (256,)))
    labels = torch.arange(num_rows).repeat_interleave(COLUMNS)
    with torch.no_grad():
        images = generator(model.draw(labels), labels)
    return (images.unflatten(0, (num_rows, COLUMNS)) + 1) / 2


def save(images: torch.Tensor, path: Path) -> None:
    """Lay images out side by side, a pixel apart."""
    num_rows, num_columns = images.shape[:2]
    framed = torch.nn.functional.pad(images, (0, 1, 0, 1), value=0.5)
    sheet = framed.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # [height, width, channels]
    figure = Figure(figsize=(num_columns * 0.8, num_rows * 0.8))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(sheet.squeeze(2), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_axis_off()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    run = Path(sys.argv[1])
    save(draw(run), run / "sheet.png")
    print(f"{run / 'sheet.png'}: a row a class, from the averaged generator")
