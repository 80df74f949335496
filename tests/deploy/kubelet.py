"""As much of Kubernetes as a release of the chart needs: controllers of Jobs and Deployments, Services, the kubelet."""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deploy.pod import NotStartedError, Pod
from tests.hosts import Hosts

INDEX = "batch.kubernetes.io/job-completion-index"
Objects = dict[tuple[str, str], dict[str, Any]]


class Cluster:
    """A network with releases: every Pod gets a new address there, and names of Services are in its /etc/hosts."""

    def __init__(self, folder: Path, num_pods: int) -> None:
        """Make a network for as many Pods as ever start."""
        self.folder, self.hosts = folder, Hosts(["open"] * (1 + num_pods))  # the first is the node's
        self.releases: list[Release] = []
        self.num_started = 0
        self._services: dict[str, str] = {}

    def install(self, objects: Objects) -> "Release":
        self.releases.append(release := Release(self, objects))
        return release

    def start(self, name: str, template: dict[str, Any], objects: Objects) -> Pod:
        """Start a Pod, for which Services with its labels stand from then on."""
        number = self.num_started + 1
        address = self.hosts.addresses[number]
        for (kind, service), each in objects.items():
            if kind == "Service" and each["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                self._services[f"{service}.training.svc"] = address
        names = {"localhost": "127.0.0.1", name: address} | self._services
        lines = [f"{address} {name}" for name, address in names.items()]
        (self.folder / f"{number}").mkdir(exist_ok=True)
        (self.folder / f"{number}/hosts").write_text("\n".join(lines) + "\n")
        pod = Pod(name, template, objects, self.hosts, number, self.folder / f"{number}")
        self.num_started = number
        return pod

    def wait_until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        """Do a cluster's work until something is so."""
        deadline = time.monotonic() + seconds
        while True:
            for release in self.releases:
                release.turn()
            if condition():
                return
            assert time.monotonic() < deadline, [f"{each.name}: {each.told}" for each in self.pods()]
            time.sleep(0.1)

    def pods(self) -> list[Pod]:
        return [pod for release in self.releases for pod in release.pods.values()]

    def close(self) -> None:
        for pod in self.pods():
            pod.program.kill()
            pod.program.communicate()
        self.hosts.close()


class Release:
    """A release of the chart: its Pods by name, one a Deployment and one an index of its Job."""

    def __init__(self, cluster: Cluster, objects: Objects) -> None:
        self.objects, self.pods, self.events = objects, dict[str, Pod](), list[str]()
        self.exit_codes: list[tuple[int, int]] = []  # indices and exit codes, in order
        self.condition = ""  # of the Job: Complete, Failed, or none yet
        self._cluster, self._completed, self._failures = cluster, set[int](), Counter[int]()

    def worker(self, index: int = 0) -> Pod:
        return self.pods[f"site-{index}"]

    def turn(self) -> None:
        """Start what has to run and does not, probe what runs, and decide about what has ended."""
        for (kind, name), each in self.objects.items():
            if kind == "Deployment" and name not in self.pods:
                self._start(name, each["spec"]["template"])
            elif kind == "Job":
                self._turn_job(name, each["spec"])
        for pod in self.pods.values():
            pod.probe()

    def _turn_job(self, name: str, job: dict[str, Any]) -> None:
        for index in range(job["completions"]):
            pod = self.pods.get(f"{name}-{index}")
            if pod is not None and pod.exit_code is not None and index not in self._completed:
                self._decide(job, index, pod.exit_code)
                pod = None
            if pod is None and not self.condition and index not in self._completed:
                self._start(f"{name}-{index}", _indexed(job["template"], index))

    def _decide(self, job: dict[str, Any], index: int, code: int) -> None:
        """Do what the Job's policies say of a Pod that has ended."""
        self.exit_codes.append((index, code))
        if code == 0:
            self._completed.add(index)
            if len(self._completed) == job["completions"]:
                self.condition = "Complete"
            return
        rules = [rule for rule in job["podFailurePolicy"]["rules"] if _matches(rule.get("onExitCodes"), code)]
        action = rules[0]["action"] if rules else "Count"
        if action == "Count":
            self._failures[index] += 1
        if action == "FailJob" or self._failures[index] > job["backoffLimitPerIndex"]:
            self._completed.add(index)
            self.condition = "Failed"

    def _start(self, name: str, template: dict[str, Any]) -> None:
        try:
            self.pods[name] = self._cluster.start(name, template, self.objects)
        except NotStartedError as error:
            if str(error) not in self.events:
                self.events.append(str(error))


def _matches(rule: dict[str, Any] | None, code: int) -> bool:
    return rule is not None and (code in rule["values"]) == (rule["operator"] == "In")


def _indexed(template: dict[str, Any], index: int) -> dict[str, Any]:
    """Return an Indexed Job's template with what its controller adds for an index."""
    metadata, (container,) = template["metadata"], template["spec"]["containers"]
    number = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}},
    }
    container = container | {"env": [number, *container["env"]]}
    annotations = metadata.get("annotations", {}) | {INDEX: str(index)}
    return {
        "metadata": metadata | {"annotations": annotations},
        "spec": template["spec"] | {"containers": [container]},
    }
