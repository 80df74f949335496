"""What models of every kind make of fixed inputs; as a program, what exported ones do in a fresh process."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def logits(network: nn.Module) -> torch.Tensor:
    return network(input_ids=torch.arange(16).view(2, 8), use_cache=False).logits


def unfused_logits(network: nn.Module) -> torch.Tensor:
    """Whoever loads a GPT-Neo has transformers' own attention: bits compare where both compute by that."""
    for module in network.modules():
        if type(module).__name__ == "FusedAttention":
            module.__class__ = type(module).__base__
    network.config._attn_implementation = "eager"
    return logits(network)


def gan(model: nn.Module) -> torch.Tensor:
    labels = torch.tensor([3, 7])
    images = model.generator(normal(2, model.generator.latent_size), labels)
    averaged = torch.cat([buffer.flatten() for buffer in model.average.buffers()])
    return torch.cat([images.flatten(), model.discriminator(images, labels).flatten(), averaged])


# name: (class of transformers, or isthmus where it is ours; what it gives)
OUTPUTS = {
    "gpt_neox": ("AutoModelForCausalLM", logits),
    "gpt_neo": ("AutoModelForCausalLM", unfused_logits),
    "huggingface": ("AutoModelForCausalLM", logits),
    "resnet": ("ResNetForImageClassification", lambda network: network(normal(2, 1, 16, 16)).logits),
    "wav2vec2": ("Wav2Vec2ForPreTraining", lambda network: network(normal(2, 8000)).projected_quantized_states),
    "wav2vec2_ctc": ("Wav2Vec2ForCTC", lambda network: network(normal(2, 8000)).logits),
    "resnet_group": ("isthmus", lambda model: getattr(model, "network", model)(normal(2, 1, 16, 16)).logits),
    "biggan": ("isthmus", gan),
    "toy": ("isthmus", lambda model: model({"tokens": torch.arange(40).view(4, 10) % 16})),
}


@torch.no_grad()
def output_of(name: str, network: nn.Module) -> torch.Tensor:
    for tensor in [*network.parameters(), *network.buffers()]:
        tensor.data = tensor.data.clone()  # where it lies in memory decides how the CPU sums it up
    return OUTPUTS[name][1](network.eval())


def load(name: str, folder: str) -> nn.Module:
    loader = OUTPUTS[name][0]
    if loader == "isthmus":
        from isthmus.models import load_exported

        return load_exported(folder, trust_imports=True)
    import transformers

    network, problems = getattr(transformers, loader).from_pretrained(folder, output_loading_info=True)
    assert not any(problems.values()), (name, problems)
    if loader == "AutoModelForCausalLM":
        check_tokenizer(network, transformers.AutoTokenizer.from_pretrained(folder))
    assert "isthmus" not in sys.modules  # transformers alone loads it
    return network


def check_tokenizer(network: nn.Module, tokenizer: object) -> None:
    """Bytes are tokens both ways, as in training, and the network writes text."""
    for text in ("one <0> two", "\0 \r\n\t  'll ", "".join(map(chr, range(1, 0x500))), "漢字 😀"):
        tokens = tokenizer(text)["input_ids"]
        assert tokens == list(text.encode()), (text, tokens)
        assert tokenizer.decode(tokens) == text, text
    assert (len(tokenizer), tokenizer.eos_token_id) == (256, 0)
    assert tokenizer.decode([104, 255, 105]) == "h\ufffdi"  # what is no UTF-8 does not spoil the rest
    prompts = tokenizer(["ab", "abc"], return_tensors="pt", padding=True, padding_side="left")
    generated = network.generate(**prompts, min_new_tokens=4, max_new_tokens=4)
    assert generated.shape == (2, 7)
    assert tokenizer.decode(generated[1]).startswith("abc")


def main() -> None:
    torch.set_num_threads(int(sys.argv[3]))  # they, too, decide how the CPU sums up
    from safetensors.torch import save_file

    folders = json.loads(sys.argv[2])
    save_file({name: output_of(name, load(name, folders[name])) for name in OUTPUTS}, sys.argv[1])


if __name__ == "__main__":
    main()
