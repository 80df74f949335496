"""shellcheck has nothing to say about any shell script of this repository."""

import shutil
import subprocess

import pytest
from tests.deploy.helm import ROOT

FOLDERS = (".ci", "benchmarks", "deploy", "examples", "src", "tests")
SHELLS = (b"#!/bin/sh", b"#!/bin/bash", b"#!/usr/bin/env bash")


def is_script(path):
    if not path.is_file() or "__pycache__" in path.parts:
        return False
    with path.open("rb") as file:
        return file.readline().rstrip() in SHELLS


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    scripts = [str(path) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if is_script(path)]
    assert f"{ROOT}/deploy/slurm/static.sbatch" in scripts
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
