"""The layers of a configuration: defaults < recipe < file < environment < command line."""

import pytest
import yaml

from isthmus.config import dump
from isthmus.core import UserError
from isthmus.recipes import load_config
from isthmus.recipes.load import merge


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("outer: {recipe: streaming, schedule: {local_steps: 40}}\ntrain: {steps: 70, seed: 3}\n")
    return path


def test_each_layer_overrides_the_ones_below(path, monkeypatch):
    config = load_config(path)
    assert config.outer.schedule.local_steps == 40  # file over recipe
    assert config.outer.split == "strided"  # recipe over default
    assert config.train.seed == 3
    monkeypatch.setenv("ISTHMUS_OUTER__SCHEDULE__LOCAL_STEPS", "60")
    monkeypatch.setenv("ISTHMUS_TRAIN__SEED", "4")
    config = load_config(path, ["train.seed=5"], workers=3)
    assert config.outer.schedule.local_steps == 60  # environment over file
    assert config.train.seed == 5  # command line over environment
    assert config.train.workers == 3  # argument over all


def test_a_method_follows_the_h_that_the_user_chose(path):
    assert load_config(path, ["outer.recipe=eager", "train.steps=3000"]).outer.schedule.overlap_steps == 40


def test_without_a_type_a_component_is_refined():
    compressor = load_config(None, ["outer.recipe=sparseloco", "outer.compressor.decay=0.5"]).outer.compressor
    assert compressor["decay"] == 0.5
    assert compressor["compressor"]["type"] == "topk"


def test_with_a_type_a_component_starts_from_its_own_defaults():
    config = load_config(None, ["outer.optimizer.type=sgd", "outer.optimizer.lr=1.0"])
    assert config.outer.optimizer["momentum"] == 0  # not the recipe's
    assert load_config(None, ["outer.compressor.type=float4"]).outer.compressor["format"] == "E3M0"


def test_merge_keeps_what_is_not_overridden():
    low = {"a": {"type": "x", "b": 1, "c": {"d": 1, "e": 2}}}
    assert merge(low, {"a": {"c": {"d": 3}}}) == {"a": {"type": "x", "b": 1, "c": {"d": 3, "e": 2}}}
    assert merge(low, {"a": {"type": "x", "c": {}}}) == {"a": {"type": "x", "c": {}}}
    assert low == {"a": {"type": "x", "b": 1, "c": {"d": 1, "e": 2}}}


def test_values_are_yaml():
    config = load_config(None, ["inner.optimizer.betas=[0.8, 0.9]", "inner.clip_norm=null", "inner.optimizer.lr=1e-3"])
    assert config.inner.optimizer["betas"] == (0.8, 0.9)
    assert config.inner.clip_norm is None
    assert config.inner.optimizer["lr"] == 0.001


def test_workers_are_as_many_as_were_started_where_nobody_says(monkeypatch):
    assert load_config().train.workers == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load_config().train.workers == 4
    assert load_config(None, ["train.workers=2"]).train.workers == 2


def test_ddp_has_no_use_for_the_method_section(path):
    outer = load_config(path, ["outer.recipe=ddp", "outer.compressor.keep=7"]).outer
    assert outer.schedule is None
    assert outer.optimizer is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [", "is not YAML: while parsing"),
        ("3", "must hold sections such as model and train, got 3"),
        ("", "must hold sections such as model and train, got None"),
        ("train:\n", "train: expected keys and values, got None"),
        ("train: {step: 3}", "train.step: unknown key, did you mean 'steps'?"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_in_another_encoding_is_one_line_with_advice(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("train: {steps: 3}", "utf-16")
    with pytest.raises(UserError, match=r"run.yaml' is not text in UTF-8 \(UTF-16, perhaps\): save it as UTF-8"):
        load_config(path)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot read the configuration .*nothing.yaml': No such file"):
        load_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [("steps", "cannot read 'steps': write section.key=value"), ("train.steps=[", "the value of 'train.steps=.'")],
)
def test_a_bad_override_is_one_line(override, message):
    with pytest.raises(UserError, match=message):
        load_config(None, [override])


def test_a_misspelt_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("ISTHMUS_TRAIN__STEP", "3")
    with pytest.raises(UserError, match="train.step: unknown key"):
        load_config()


def test_other_variables_with_the_prefix_are_none_of_its_business(monkeypatch):
    monkeypatch.setenv("ISTHMUS_NATIVE", "0")
    load_config()


def test_what_was_derived_when_a_run_began_stays_when_it_goes_on(path, tmp_path):
    first = load_config(path, [f"train.run_dir={tmp_path}"], workers=2)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dump(first)))
    longer = [f"train.run_dir={tmp_path}", "train.steps=70000"]
    again = load_config(path, longer, workers=2, resume=True)
    assert again.train.steps == 70000
    assert again.outer == first.outer
    anew = load_config(path, longer, workers=2)
    assert anew.outer.schedule.warm_start_steps > first.outer.schedule.warm_start_steps


def test_a_run_goes_on_without_what_its_version_did_not_know(path, tmp_path):
    chosen = ["outer.recipe=muloco", f"train.run_dir={tmp_path}"]
    values = dump(load_config(path, chosen, workers=4))
    assert values["outer"]["schedule"].pop("warm_start_lr") == 1.41
    del values["outer"]["gradient_compressor"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    outer = load_config(path, chosen, workers=4, resume=True).outer
    assert outer.schedule.warm_start_lr == 1
    assert outer.gradient_compressor is None


def test_what_the_user_chooses_counts_also_when_a_run_goes_on(path, tmp_path):
    folder = f"train.run_dir={tmp_path}"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(dump(load_config(path, [folder]))))
    assert (
        load_config(path, [folder, "outer.schedule.warm_start_steps=6"], resume=True).outer.schedule.warm_start_steps
        == 6
    )
    other = ["outer.recipe=eager", folder]
    assert load_config(path, other, resume=True) == load_config(path, other)
