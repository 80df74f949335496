"""What tests of data share."""

import datasets
import pytest


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Nothing is asked of the Hub, nothing is left in the user's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
