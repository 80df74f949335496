"""Parts of whole tensors: which one a rank holds, and how it is cut out of those that others held."""

import itertools

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from isthmus.core.fragment import local_view
from isthmus.parallel import ParallelDims, apply_fsdp, apply_tp, open_mesh
from isthmus.parallel.state import StoredTensor, TensorSlice, assemble_slice, named_tensors

ROWS = (31, 9, 5, 2, 1)  # four ranks: uneven parts, empty ones
MESHES = (ParallelDims(shard=4), ParallelDims(tp=4), ParallelDims(shard=2, tp=2))


def box(part: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).float().view(shape)


def hold() -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]]:
    """What this rank has of some layers, and whether the values there are those of its part."""
    held = []
    for mesh, rows, style in itertools.product(MESHES, ROWS, (ColwiseParallel, RowwiseParallel)):
        device_mesh = open_mesh(mesh, 1)
        model = nn.Sequential(nn.Linear(rows, rows), nn.LayerNorm(rows))
        wholes = {name: numbered(*param.shape) for name, param in model.named_parameters()}
        model.load_state_dict(wholes)
        apply_tp(model, {"0": style()} if mesh.tp > 1 else {}, device_mesh)
        apply_fsdp(model, mesh, device_mesh)
        parts = {name: TensorSlice.of(tensor) for name, tensor in named_tensors(model).items()}
        equal = {
            name: torch.equal(local_view(t), wholes[name][box(parts[name])]) for name, t in model.named_parameters()
        }
        held += [(part.shape, part.offsets, part.sizes, equal[name]) for name, part in parts.items()]
    return held


@pytest.mark.processes
def test_a_rank_knows_which_part_it_holds():
    for tensor in zip(*run_ranks(hold, 4), strict=True):
        assert all(equal for *_, equal in tensor)
        whole = torch.zeros(tensor[0][0])
        for part in {TensorSlice(*part) for *part, _ in tensor}:
            whole[box(part)] += 1
        assert torch.equal(whole, torch.ones_like(whole))


def test_tied_parameters_have_one_name():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)])
    model[1].weight = model[0].weight
    names = list(named_tensors(model))
    assert "0.weight" in names
    assert "1.weight" not in names
    assert "2.running_mean" in names


def cut(shape: tuple[int, ...], *cuts: tuple[int, int]) -> list[TensorSlice]:
    """The parts of ranks that share a tensor out: (dimension, number of ranks), one after the other."""
    parts = [TensorSlice(shape, (0,) * len(shape), shape)]
    for dim, num_ranks in cuts:
        parts = [piece for part in parts for piece in _cut(part, dim, num_ranks)]
    return parts


def _cut(part: TensorSlice, dim: int, num_ranks: int) -> list[TensorSlice]:
    lengths = [len(chunk) for chunk in torch.arange(part.sizes[dim]).chunk(num_ranks)]
    pieces, start = [], part.offsets[dim]
    for length in lengths + [0] * (num_ranks - len(lengths)):
        offsets, sizes = list(part.offsets), list(part.sizes)
        offsets[dim], sizes[dim] = start, length
        pieces.append(TensorSlice(part.shape, tuple(offsets), tuple(sizes)))
        start += length
    return pieces


CUTS = {
    "whole": [],
    "2 rows": [(0, 2)],
    "4 rows": [(0, 4)],
    "3 columns": [(1, 3)],
    "rows and rows": [(0, 2), (0, 2)],
    "columns and rows": [(1, 2), (0, 4)],
}


@pytest.fixture
def store(tmp_path):
    """Writes a tensor to a file, and gives it back unread."""
    numbers = itertools.count()

    def write(tensor: torch.Tensor) -> StoredTensor:
        path = tmp_path / f"{next(numbers)}.safetensors"
        save_file({"0": tensor.contiguous()}, path)
        return StoredTensor(safe_open(path, "pt").get_slice("0"))

    return write


@pytest.mark.parametrize("shape", [(7, 5), (2, 3), (1, 4), (0, 3)])
@pytest.mark.parametrize("there", CUTS)
def test_any_part_comes_out_of_any_parts(store, shape, there):
    whole = numbered(*shape).bfloat16()
    pieces = [(part, store(whole[box(part)])) for part in cut(shape, *CUTS[there])]
    for here in CUTS.values():
        for part in cut(shape, *here):
            found = assemble_slice(part, pieces + pieces)  # what tensor parallelism does not split, several ranks hold
            assert found.dtype == torch.bfloat16
            assert torch.equal(found, whole[box(part)])


def test_a_number_is_a_part_of_its_own(store):
    (part,) = cut(())
    assert assemble_slice(part, [(part, store(torch.tensor(3.0)))]) == 3
