"""Images on disk and the embedded digits: what is read, how it is split, altered and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from isthmus.core import UserError
from isthmus.data import OrderedBatches
from isthmus.data.images import Images
from isthmus.models.resnet import ResNet
from isthmus.recipes import load_config
from isthmus.train.assemble import open_data

CLASSES = ("ant", "bee", "cat")


def save(path: Path, pixels, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **options)


def number_image(number: int, size: tuple[int, int] = (12, 12)) -> np.ndarray:
    """Its red says which it is, whatever part of it is seen."""
    return np.broadcast_to(np.array([number, 128, 7]), (*size, 3))


def numbers(batch) -> list[int]:
    return ((batch["image"][:, 0, 0, 0] + 1) * 127.5).round().long().tolist()


@pytest.fixture
def folder(tmp_path):
    """Sixty images of mixed sizes, twenty a class."""
    for number in range(60):
        size = [(12, 12), (20, 9), (7, 31)][number % 4 % 3]
        save(tmp_path / "all" / CLASSES[number // 20] / f"{number}.png", number_image(number, size))
    (tmp_path / "all" / "ant" / "notes.txt").write_text("no image")
    (tmp_path / "all" / "ant" / ".hidden.png").write_text("no image")
    (tmp_path / "all" / ".git").mkdir()
    return tmp_path / "all"


def open_images(source: Path | str, size: int = 8, channels: int = 3, **options):
    return Images(str(source), **options).open(size, channels)


def everything(source) -> dict:
    return source.read(np.arange(len(source)), None)


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    data_set = Images(validation_fraction=0.2).open(8, 1)
    train, held_out = everything(data_set.train), everything(data_set.held_out)
    assert len(train["label"]) + len(held_out["label"]) == 1797
    assert 300 < len(held_out["label"]) < 420
    assert data_set.sizes == {"num_classes": 10}
    assert train["image"].dtype == torch.float32
    assert train["label"].dtype == torch.int64
    assert (train["image"].min(), train["image"].max()) == (-1, 1)

    def rows(images, labels):
        return sorted((*image, label) for image, label in zip(images.reshape(-1, 64).tolist(), labels, strict=True))

    digits = load_digits()
    levels = (torch.cat([train["image"], held_out["image"]]).numpy() + 1) * 8
    labels = torch.cat([train["label"], held_out["label"]]).tolist()
    assert rows(levels.round(), labels) == rows(digits.images, digits.target.tolist())


def test_classes_are_numbered_by_name_and_split_by_a_hash_of_the_path(folder, tmp_path):
    def sides(root):
        data_set = open_images(root, validation_fraction=0.3)
        for side in (data_set.train, data_set.held_out):
            batch = everything(side)
            assert batch["label"].tolist() == [number // 20 for number in numbers(batch)]
        return set(numbers(everything(data_set.train))), set(numbers(everything(data_set.held_out)))

    train, held_out = sides(folder)
    assert sorted(train | held_out) == list(range(60))
    assert train.isdisjoint(held_out)
    assert 8 <= len(held_out) <= 30
    for number in range(10):
        save(folder / "ant" / f"more{number}.png", number_image(number))
    (folder / "bee" / "25.png").unlink()
    moved = folder.rename(tmp_path / "moved")
    more_train, more_held_out = open_images(moved, validation_fraction=0.3).train, sides(moved)[1]
    assert train - {25} <= set(numbers(everything(more_train)))
    assert held_out - {25} <= more_held_out


@pytest.mark.parametrize("name", ["validation", "val"])
def test_train_and_validation_folders_are_taken_as_they_are(tmp_path, name):
    for number in range(12):
        save(tmp_path / "train" / CLASSES[number % 3] / f"{number}.JPG", number_image(number), quality=100)
    save(tmp_path / name / "cat" / "0.png", number_image(99))
    data_set = open_images(tmp_path)
    assert everything(data_set.train)["label"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert numbers(everything(data_set.held_out)) == [99]
    assert everything(data_set.held_out)["label"].tolist() == [2]
    assert data_set.sizes == {"num_classes": 3}


@pytest.mark.parametrize("wide", [True, False])
def test_validation_sees_the_largest_square_in_the_middle(tmp_path, wide):
    thirds = np.repeat(np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])[None], 30, axis=1)
    pixels = np.broadcast_to(thirds, (30, 90, 3))
    for name in ("a", "b"):
        save(tmp_path / "all" / "class" / f"{name}.png", pixels if wide else pixels.transpose(1, 0, 2))
    image = open_images(tmp_path / "all").held_out.read(np.arange(1), None)["image"][0]
    assert image.shape == (3, 8, 8)
    image = image if wide else image.mT
    assert torch.equal(image[:, :, 1:-1], torch.tensor([-1.0, 1.0, -1.0])[:, None, None].expand(3, 8, 6))
    assert -1 < image[0, 0, 0] < -0.7, "a filter as wide as two new pixels looks beyond the edge"
    assert torch.equal(image[0, :, 0], image[2, :, -1])


def test_grey_images_get_three_channels_and_coloured_ones_become_grey(tmp_path):
    save(tmp_path / "grey" / "class" / "a.png", np.full((9, 9), 51))
    save(tmp_path / "grey" / "class" / "b.png", np.full((9, 9), 51))
    image = open_images(tmp_path / "grey").train.read(np.arange(1), None)["image"]
    torch.testing.assert_close(image, torch.full((1, 3, 8, 8), -0.6))
    for name in ("a.png", "b.png"):
        save(tmp_path / "colour" / "class" / name, np.broadcast_to(np.array([255, 0, 0]), (9, 9, 3)))
    image = open_images(tmp_path / "colour", channels=1).train.read(np.arange(1), None)["image"]
    assert image.shape == (1, 1, 8, 8)
    torch.testing.assert_close(image, torch.full_like(image, 76 / 127.5 - 1))  # 0.299 of red (ITU-R BT.601)


def test_unusual_files_look_as_they_should(tmp_path):
    """16 bits a pixel, a palette, and a photograph taken with the camera turned: red is at its top."""
    folder = tmp_path / "all" / "class"
    half = np.zeros((10, 10, 3), np.uint8)
    half[:, :5, 0] = 255  # red at the left as stored
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    save(folder / "turned.jpg", half, exif=exif, quality=95)
    save(folder / "palette.gif", half)
    Image.fromarray(np.full((10, 10), 0x8000, np.uint16)).save(folder / "deep.png")
    data_set = open_images(tmp_path / "all")
    names = [*data_set.train.names, *data_set.held_out.names]
    pixels = torch.cat([everything(data_set.train)["image"], everything(data_set.held_out)["image"]])
    seen = {name.split("/")[-1]: image for name, image in zip(names, pixels, strict=True)}
    assert seen["turned.jpg"][0, :3].min() > 0.8
    assert seen["turned.jpg"][0, 5:].max() < -0.8
    assert seen["palette.gif"][0, :, :3].min() > 0.8
    torch.testing.assert_close(seen["deep.png"], torch.full((3, 8, 8), 128 / 127.5 - 1))


def gradient(tmp_path: Path, width: int = 40) -> Path:
    """Two images whose red grows from left to right, whose green grows downwards."""
    pixels = np.zeros((40, width, 3))
    pixels[:, :, 0], pixels[:, :, 1] = np.linspace(0, 255, width), np.linspace(0, 255, 40)[:, None]
    save(tmp_path / "all" / "class" / "a.png", pixels)
    save(tmp_path / "all" / "class" / "b.png", pixels)
    return tmp_path / "all"


def test_crops_lie_anywhere_and_are_as_small_as_said(tmp_path):
    source = open_images(gradient(tmp_path), smallest_crop=0.5, flip=False).train
    image = (source.read(np.zeros(400, np.int64), np.arange(400))["image"] + 1) / 2
    left, right = image[:, 0, :, 0].mean(1), image[:, 0, :, -1].mean(1)
    widths = (right - left) * 8 / 7  # between the middles of the first and last of 8 pixels
    heights = (image[:, 1, -1, :] - image[:, 1, 0, :]).mean(1) * 8 / 7
    assert 0.45 < widths.min() < 0.55
    assert 0.9 < widths.max() < 1.05
    torch.testing.assert_close(widths, heights, atol=0.06, rtol=0)
    assert left.min() < 0.1
    assert right.max() > 0.9
    assert abs((left + right).mean() / 2 - 0.5) < 0.03


def test_half_of_the_images_are_mirrored_where_that_is_wanted(tmp_path):
    def mirrored(**options):
        source = open_images(gradient(tmp_path), smallest_crop=1, **options).train
        image = source.read(np.zeros(200, np.int64), np.arange(200))["image"]
        return (image[:, 0, :, 0] > image[:, 0, :, -1]).float().mean().item()

    assert 0.4 < mirrored() < 0.6
    assert mirrored(flip=False) == 0
    digits = Images(smallest_crop=1).open(8, 1).train
    few = np.arange(50)
    assert torch.equal(digits.read(few, few)["image"], digits.read(few, None)["image"])


def test_what_is_random_depends_on_the_seed_alone(tmp_path):
    samples = [open_images(gradient(tmp_path)).sample_order(seed) for seed in (1, 1, 2)]
    first, again, other = (each.read(np.arange(30))["image"] for each in samples)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(samples[0].read(np.arange(7, 12))["image"], first[7:12])
    assert len({image.numpy().tobytes() for image in first}) == 30


def test_workers_share_a_folder_and_go_on_where_others_stopped(folder):
    """Two workers read disjoint images; then three go on, who read all that is left of the epoch, once."""
    data_set = open_images(folder)
    size = len(data_set.train)
    assert size >= 50
    two = [OrderedBatches(data_set.sample_order(seed=5), 4, worker, 2) for worker in range(2)]
    read = [number for _ in range(3) for stream in two for number in numbers(next(stream))]
    three = [OrderedBatches(open_images(folder).sample_order(seed=5), 2, worker, 3) for worker in range(3)]
    for stream in three:
        stream.load_state_dict(two[0].state_dict())
    read += [number for _ in range(5) for stream in three for number in numbers(next(stream))]
    assert len(read) == 54
    assert sorted(read[:size]) == sorted(numbers(everything(data_set.train)))
    state = three[1].state_dict()
    expected = next(three[1])
    three[1].load_state_dict(state)
    assert torch.equal(next(three[1])["image"], expected["image"]), "altered alike as well"


def spoil(folder: Path) -> list[Path]:
    """Damage three training images, each in its own way."""
    train = [folder / name for name in open_images(folder).train.names[3:9:2]]
    whole = train[0].read_bytes()
    train[0].write_bytes(whole[: len(whole) // 2])
    train[1].write_bytes(b"")
    train[2].write_text("<html>not found</html>")
    return train


def test_a_file_that_cannot_be_read_is_named_counted_and_passed_over(folder, caplog):
    before = everything(open_images(folder).train)
    bad = spoil(folder)
    source = open_images(folder, max_bad_samples=3).train
    for _ in range(2):
        batch = everything(source)
        replaced = before["image"].clone()
        for number in (3, 5, 7):
            replaced[number] = before["image"][number + 1]
        assert torch.equal(batch["image"], replaced)
        assert batch["label"][[3, 5, 7]].tolist() == before["label"][[4, 6, 8]].tolist()
    lines = caplog.messages
    assert len(lines) == 3
    for path in bad:
        assert sum(f"'{path.parent.name}/{path.name}' cannot be read (" in line for line in lines) == 1
    assert lines[-1].endswith("3 of at most 3")


def test_one_bad_file_too_many_ends_the_run(folder):
    spoil(folder)
    source = open_images(folder, max_bad_samples=2).train
    with pytest.raises(UserError, match=r"'\w+/\d+\.png' cannot be read \(.*bad sample number 3: mend") as error:
        everything(source)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_gone_is_no_endless_search(folder):
    source = open_images(folder, max_bad_samples=1000).train
    for path in folder.rglob("*.png"):
        path.unlink()
    with pytest.raises(UserError, match="none of the samples can be read"):
        everything(source)


def refused(match: str, *arguments, **options) -> None:
    with pytest.raises(UserError, match=match) as error:
        open_images(*arguments, **options)
    assert "\n" not in str(error.value)


def test_bad_sources_are_refused(tmp_path, folder):
    refused("nowhere' is no folder", tmp_path / "nowhere")
    refused("is no folder", folder / "ant" / "notes.txt")
    refused("no images in sub-folders", folder / "ant")
    refused("no images in sub-folders", tmp_path)  # whose only folder has only folders
    (tmp_path / "one" / "class").mkdir(parents=True)
    (folder / "ant" / "3.png").rename(tmp_path / "one" / "class" / "3.png")
    refused("no validation samples", tmp_path / "one")
    save(tmp_path / "split" / "train" / "ant" / "0.png", number_image(0))
    save(tmp_path / "split" / "val" / "dog" / "0.png", number_image(0))
    refused("class 'dog' is in val but not in train", tmp_path / "split")


def test_bad_options_are_refused(folder):
    refused("the model has 2 channels", folder, channels=2)
    refused("validation_fraction is 1", folder, validation_fraction=1.0)
    refused("smallest_crop is 0", folder, smallest_crop=0.0)
    refused("max_bad_samples is -1", folder, max_bad_samples=-1)


def test_labels_out_of_the_models_range_are_refused():
    def open_for(*model: str):
        config = load_config(None, ["data.type=images", *model])
        return open_data(config, ResNet(**{name: v for name, v in config.model.items() if name != "type"}))

    assert open_for("model={type: resnet, num_classes: 12}").sizes == {"num_classes": 10}
    with pytest.raises(UserError, match=r"model\.num_classes is 5, the data has 10: raise it"):
        open_for("model={type: resnet, num_classes: 5}")


def test_text_models_have_no_use_for_images():
    config = load_config(None, ["data.type=images"])
    from isthmus.train.assemble import build_model_spec

    with pytest.raises(UserError, match="images is for models with image_size, gpt_neox has none"):
        open_data(config, build_model_spec(config))
