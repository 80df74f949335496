"""What models of every kind make of fixed inputs; as a program, what exported ones do in a fresh process."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def gan(model: nn.Module) -> torch.Tensor:
    labels = torch.tensor([3, 7])
    images = model.generator(normal(2, model.generator.latent_size), labels)
    averaged = torch.cat([buffer.flatten() for buffer in model.average.buffers()])
    return torch.cat([images.flatten(), model.discriminator(images, labels).flatten(), averaged])


# name: (class of transformers, or isthmus where it is ours; what it gives)
OUTPUTS = {
    "resnet": ("ResNetForImageClassification", lambda network: network(normal(2, 1, 16, 16)).logits),
    "wav2vec2": ("Wav2Vec2ForPreTraining", lambda network: network(normal(2, 8000)).projected_quantized_states),
    "wav2vec2_ctc": ("Wav2Vec2ForCTC", lambda network: network(normal(2, 8000)).logits),
    "biggan": ("isthmus", gan),
}


@torch.no_grad()
def output_of(name: str, network: nn.Module) -> torch.Tensor:
    for tensor in [*network.parameters(), *network.buffers()]:
        tensor.data = tensor.data.clone()  # where it lies in memory decides how the CPU sums it up
    return OUTPUTS[name][1](network.eval())


def main() -> None:
    torch.set_num_threads(int(sys.argv[3]))  # they, too, decide how the CPU sums up
    import transformers
    from safetensors.torch import save_file

    from isthmus.models import load_exported

    found = {}
    for name, folder in json.loads(sys.argv[2]).items():
        loader = OUTPUTS[name][0]
        if loader == "isthmus":
            network = load_exported(folder)
        else:
            network, problems = getattr(transformers, loader).from_pretrained(folder, output_loading_info=True)
            assert not any(problems.values()), (name, problems)
        found[name] = output_of(name, network)
    save_file(found, sys.argv[1])


if __name__ == "__main__":
    main()
