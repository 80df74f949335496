"""The alert rules: what they ask for exists, and Prometheus' own tool finds each where it is due."""

import re
import shutil
import subprocess

import pytest
import yaml
from tests.deploy.helm import ROOT

from isthmus.train.trackers.prometheus import COUNTERS, GAUGES

FOLDER = ROOT / "deploy/prometheus"
RULES = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments):
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian has it in prometheus)")
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_asks_for_figures_that_exist_and_says_what_to_do(rule):
    figures = {f"isthmus_{name}" for name in GAUGES} | {f"isthmus_{name}_total" for name in COUNTERS}
    asked = set(re.findall(r"isthmus_\w+", rule["expr"]))
    assert asked
    assert asked <= figures
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


def test_every_rule_has_a_case():
    cases = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    fired = {each["alertname"] for case in cases for each in case["alert_rule_test"] if each["exp_alerts"]}
    assert fired == {rule["alert"] for rule in RULES}


def test_each_alert_comes_where_it_is_due():
    promtool("test", "rules", "alerts_test.yaml")


def test_prometheus_takes_the_configuration():
    assert "SUCCESS: 1 rule files found" in promtool("check", "config", "scrape.yaml")
