"""The plain files for Kubernetes: those of its own kinds, and those of JobSet, Kubeflow's Trainer and Kueue."""

import pytest
import yaml
from tests.deploy.helm import CHART, ROOT, check_custom, check_strictly, helm

from isthmus.recipes.load import load_config

FOLDER = ROOT / "deploy/kubernetes"
OWN = ("v1", "apps/v1", "batch/v1", "networking.k8s.io/v1")  # of Kubernetes itself
KNOWN = ("jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1")  # of which definitions may be at hand
HELMS = ("app.kubernetes.io/managed-by", "helm.sh/chart")  # labels that only Helm's own objects have
RENDERED = (
    *("--values", str(CHART / "values-nvidia.yaml"), "--set-file", f"run={ROOT}/examples/gpt_neox.yaml"),
    *("--set", "workers=2,lighthouse.enabled=true,secrets.existing=isthmus-environment"),
)


def objects(name):
    return [each for each in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()) if each]


def of_kind(name, kind):
    (found,) = [each for each in objects(name) if each["kind"] == kind]
    return found


@pytest.mark.parametrize("name", ["elastic", "jobset", "trainjob"])
def test_each_object_satisfies_its_schema(name):
    for each in objects(name):
        if each["apiVersion"] in OWN:
            check_strictly(each)
        else:
            assert each["apiVersion"] in KNOWN
            check_custom(each)
            each["spec"]["nobody"] = "knows this"
            with pytest.raises(Exception, match="'nobody' was unexpected"):
                check_custom(each)


@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("jobset", "JobSet", "JobsetV1alpha2JobSet"),
        ("trainjob", "ClusterTrainingRuntime", "TrainerV1alpha1ClusterTrainingRuntime"),
        ("trainjob", "TrainJob", "TrainerV1alpha1TrainJob"),
    ],
)
def test_trainers_own_models_lose_no_key(name, kind, model):
    """They drop silently what they do not know."""
    from kubeflow_trainer_api import models

    found = of_kind(name, kind)
    read = getattr(models, model).from_dict
    assert read(found).to_dict() == found
    assert read(found | {"nobody": "knows this"}).to_dict() == found


def test_the_elastic_one_is_what_the_chart_makes(request):
    done = helm("template", "isthmus", str(CHART), *RENDERED)
    lines = [line for line in done.stdout.splitlines() if not line.strip().startswith((*HELMS, "# Source:"))]
    path = FOLDER / "elastic.yaml"
    head = path.read_text().partition("---\n")[0]
    if request.config.getoption("--regenerate-golden"):
        path.write_text(head + "\n".join(line for line in lines if line) + "\n")
    assert list(yaml.safe_load_all("\n".join(lines))) == list(yaml.safe_load_all(path.read_text().removeprefix(head)))


def test_the_static_ones_run_what_isthmus_reads(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(of_kind("jobset", "ConfigMap")["data"]["run.yaml"])
    config = load_config(path)
    job = of_kind("jobset", "JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == config.train.workers == 2
    trained = of_kind("trainjob", "TrainJob")["spec"]
    assert trained["trainer"]["numNodes"] == config.train.workers
    runtime = of_kind("trainjob", "ClusterTrainingRuntime")
    assert trained["runtimeRef"]["name"] == runtime["metadata"]["name"]
    pods = [job["template"]["spec"], runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]]
    mounted = [pods[0], pods[1]["template"]["spec"]]
    assert mounted[0]["volumes"] == mounted[1]["volumes"]
    assert {each["metadata"]["name"] for each in objects("jobset")} == {"isthmus-run", "isthmus-data", "isthmus"}


def test_ranks_of_the_jobset_meet_at_its_first_pod():
    jobset = of_kind("jobset", "JobSet")
    (worker,) = jobset["spec"]["replicatedJobs"]
    (container,) = worker["template"]["spec"]["template"]["spec"]["containers"]
    name = jobset["metadata"]["name"]
    assert f"--master-addr={name}-{worker['name']}-0-0.{name}" in container["args"]
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in container["args"]


def test_who_stopped_restarts_the_jobset_and_who_is_wrong_fails_it():
    jobset = of_kind("jobset", "JobSet")["spec"]
    (rule,) = jobset["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2, 75])
    stopped, wrong = jobset["failurePolicy"]["rules"]
    assert stopped["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert stopped["onJobFailureMessagePatterns"] == ["exit code 75"]
    assert wrong["action"] == "FailJobSet"


@pytest.mark.parametrize("name", ["kueue", "multikueue"])
def test_queues_name_one_another(name):
    found = objects(name)
    assert {each["apiVersion"] for each in found} == {"kueue.x-k8s.io/v1beta2"}
    names = {
        kind: {each["metadata"]["name"] for each in found if each["kind"] == kind}
        for kind in {each["kind"] for each in found}
    }
    for each in found:
        spec = each.get("spec", {})
        match each["kind"]:
            case "LocalQueue":
                assert spec["clusterQueue"] in names["ClusterQueue"]
            case "ClusterQueue":
                (group,) = spec["resourceGroups"]
                for flavor in group["flavors"]:
                    assert flavor["name"] in names["ResourceFlavor"]
                    assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
                for check in spec.get("admissionChecksStrategy", {}).get("admissionChecks", []):
                    assert check["name"] in names["AdmissionCheck"]
            case "AdmissionCheck":
                assert spec["parameters"]["name"] in names["MultiKueueConfig"]
            case "MultiKueueConfig":
                assert set(spec["clusters"]) <= names["MultiKueueCluster"]
