"""What Helm makes of the chart, for every accelerator, and what it refuses."""

import json

import pytest
import yaml
from tests.deploy.helm import CHART, ROOT, check_strictly, helm, refusal, render

from isthmus.recipes.load import load_config

RUN = (ROOT / "examples/tiny.yaml").read_text()
KNOWN = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "grafana.integreatly.org/v1beta1/GrafanaDashboard",
)
ONE_SITE = {"run": RUN, "lighthouse": {"enabled": True}}
EVERYTHING = {  # that a site can have, over hivemind
    "run": {
        "model": {"type": "gpt_neox", "size": "14m"},
        "data": {"type": "text", "source": "stdlib"},
        "mesh": {"shard": 2, "tp": 2},
        "outer": {"recipe": "diloco", "transport": {"type": "hivemind", "sync_budget_seconds": 30}},
        "train": {"steps": 12000000, "workers": 6},
    },
    "workers": 2,
    "firstWorker": 4,
    "allow": ["my_package", "other.module"],
    "resources": {"gpuCount": 4, "gpuVendor": "NVIDIA"},
    "runtimeClassName": "nvidia",
    "image": {"default": {"digest": f"sha256:{'0' * 64}"}, "pullSecrets": ["one", "two"]},
    "storage": {"type": "claim", "className": "fast"},
    "dht": {"enabled": True, "peerId": "QmPeer", "announce": ["/dns4/dht.example/tcp/29520"]},
    "relay": {
        "enabled": True,
        "address": "relay.example:29530",
        "service": {
            "type": "LoadBalancer",
            "annotations": {"an/annotation": "here"},
            "loadBalancerSourceRanges": ["192.0.2.0/24"],
        },
    },
    "lighthouse": {"enabled": True},
    "secrets": {"runSecret": "sixteen letters.", "wandbApiKey": "key"},
    "keys": {"secret": "site-keys"},
    "networkPolicy": {"from": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]},
    "queue": "training",
    "priorityClassName": "low",
    "nodeSelector": {"kind": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "supplementalGroups": [44],
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "volumes": [{"name": "samples", "hostPath": {"path": "/samples"}}],
    "volumeMounts": [{"name": "samples", "mountPath": "/samples"}],
    "podLabels": {"team": "language"},
    "podAnnotations": {"note": "here"},
}


def worker(objects):
    """Return the Job of the workers, its Pods' specification and their container."""
    job = objects["Job", "site"]
    spec = job["spec"]["template"]["spec"]
    return job, spec, spec["containers"][0]


def settings(container):
    """Return what the container's command sets above the run's YAML."""
    return [each.removeprefix("--set=") for each in container["args"] if each.startswith("--set=")]


def transport(container):
    (text,) = [each for each in settings(container) if each.startswith("outer.transport=")]
    return json.loads(text.partition("=")[2])


def test_helm_finds_nothing_to_complain_of():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout
    assert helm("lint", "--strict", str(CHART), values=EVERYTHING).returncode == 0


@pytest.mark.parametrize("accelerator", ["cpu", "nvidia", "amd"])
def test_every_accelerator_satisfies_every_version_of_kubernetes(accelerator):
    objects = render("--values", str(CHART / f"values-{accelerator}.yaml"), values=ONE_SITE)
    for each in objects.values():
        check_strictly(each)
    _, spec, container = worker(objects)
    wanted = {"nvidia": {"nvidia.com/gpu": 1}, "amd": {"amd.com/gpu": 1}, "cpu": {}}[accelerator]
    for kind in ("requests", "limits"):
        amounts = {name: amount for name, amount in container["resources"][kind].items() if "/" in name}
        assert amounts == wanted
    tag = {"nvidia": "0.1.0", "amd": "0.1.0-rocm", "cpu": "0.1.0-cpu"}[accelerator]
    assert container["image"] == f"isthmus:{tag}"
    assert spec.get("runtimeClassName") == ("nvidia" if accelerator == "nvidia" else None)


def test_a_site_with_everything_satisfies_every_version_of_kubernetes():
    objects = render("--api-versions", ",".join(KNOWN), values=EVERYTHING)
    for each in objects.values():
        if each["apiVersion"].split("/")[0] not in ("monitoring.coreos.com", "grafana.integreatly.org"):
            check_strictly(each)
    servers = [(kind, f"site-{part}") for kind in ("Deployment", "Service") for part in ("dht", "lighthouse", "relay")]
    assert servers == sorted(each for each in objects if each[0] in ("Deployment", "Service"))


def test_the_schemas_refuse_a_key_that_no_kubernetes_knows():
    job, _, _ = worker(render(values=ONE_SITE))
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(Exception, match="'completion' was unexpected"):
        check_strictly(job)


def test_isthmus_reads_what_a_worker_is_started_with(tmp_path):
    objects = render(values=ONE_SITE)
    path = tmp_path / "run.yaml"
    path.write_text(objects["ConfigMap", "site"]["data"]["run.yaml"])
    assert path.read_text() == RUN
    _, _, container = worker(objects)
    assert container["args"][:4] == ["train", "/etc/isthmus/run.yaml", "--resume", "auto"]
    config = load_config(path, settings(container))
    assert config.outer.transport["lighthouse"] == "site-lighthouse.training.svc:29510"
    assert config.outer.transport["port"] == container["ports"][0]["containerPort"] == 29540
    assert config.track.prometheus_port == container["ports"][1]["containerPort"] == 9100
    assert config.outer.transport["sync_budget_seconds"] == 20  # of the run's own
    assert config.train.workers == 1
    assert load_config(path).train.workers == 1


def test_workers_are_those_of_the_site_unless_the_run_says_how_many_all_are():
    assert "train.workers=3" in settings(worker(render(values=ONE_SITE | {"workers": 3}))[2])
    told = ONE_SITE | {"run": RUN.replace("steps: 60", "steps: 60, workers: 5"), "workers": 3}
    assert not [each for each in settings(worker(render(values=told))[2]) if each.startswith("train.")]


def test_a_run_of_values_keeps_its_numbers(tmp_path):
    objects = render(values=EVERYTHING)
    run = yaml.safe_load(objects["ConfigMap", "site"]["data"]["run.yaml"])
    assert run == EVERYTHING["run"]


def test_several_gpus_are_ranks_under_torchrun_with_a_port_each():
    objects = render(values=EVERYTHING)
    _, spec, container = worker(objects)
    assert "--nproc-per-node=4" in container["command"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert spec["runtimeClassName"] == "nvidia"
    assert transport(container)["listen"] == ["/ip4/0.0.0.0/tcp/29544"]
    (link, metrics) = objects["NetworkPolicy", "site"]["spec"]["ingress"]
    assert link["ports"] == [{"protocol": "TCP", "port": 29540, "endPort": 29544}]
    assert link["from"] == EVERYTHING["networkPolicy"]["from"]
    assert metrics == {"ports": [{"protocol": "TCP", "port": 9100}]}


def test_over_torchft_a_worker_of_one_rank_has_one_port():
    link, _ = render(values=ONE_SITE)["NetworkPolicy", "site"]["spec"]["ingress"]
    assert link == {"ports": [{"protocol": "TCP", "port": 29540}]}


def test_who_stopped_is_started_again_and_who_is_wrong_ends_the_job():
    job, spec, container = worker(render(values=EVERYTHING))
    assert spec["restartPolicy"] == "Never"
    wrong, stopped, drained = job["spec"]["podFailurePolicy"]["rules"]
    assert (wrong["action"], wrong["onExitCodes"]["values"]) == ("FailJob", [2])
    assert (stopped["action"], stopped["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (drained["action"], drained["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert wrong["onExitCodes"]["containerName"] == stopped["onExitCodes"]["containerName"] == container["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert {"name": "ISTHMUS_WORKER_OFFSET", "value": "4"} in container["env"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"


def test_nobody_is_root_and_nobody_writes_but_to_volumes():
    pods = [
        each["spec"]["template"]["spec"]
        for (kind, _), each in render(values=EVERYTHING).items()
        if kind != "Secret" and "template" in each.get("spec", {})
    ]
    assert len(pods) == 4
    for spec in pods:
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 1000
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security.pop("capabilities") == {"drop": ["ALL"]}
            assert security == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
            paths = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert paths <= {"/data", "/tmp", "/dev/shm", "/samples"}


def test_secrets_stand_in_secrets_alone():
    objects = render(values=EVERYTHING)
    secret = objects.pop(("Secret", "site-environment"))
    assert secret["stringData"] == {"ISTHMUS_RUN_SECRET": "sixteen letters.", "WANDB_API_KEY": "key"}
    assert "sixteen letters." not in json.dumps([*objects.values()])
    _, _, container = worker(objects)
    assert container["envFrom"] == [{"secretRef": {"name": "site-environment"}}]
    lighthouse = json.dumps(objects["Deployment", "site-lighthouse"]["spec"]["template"]["spec"])
    assert "site-environment" not in lighthouse
    assert "site-keys" not in lighthouse
    own = render(values=ONE_SITE | {"secrets": {"existing": "mine"}})
    assert not [kind for kind, _ in own if kind == "Secret"]
    assert worker(own)[2]["envFrom"] == [{"secretRef": {"name": "mine"}}]


def test_each_worker_has_a_key_of_its_own():
    told = transport(worker(render(values=EVERYTHING))[2])
    assert told["identity"] == "/etc/isthmus/keys/worker-$(JOB_COMPLETION_INDEX).key"
    assert told["trusted"] == "/etc/isthmus/keys/trusted.txt"
    assert told["via"] == "relay.example:29530"
    assert told["initial_peers"] == ["/dns4/site-dht.training.svc/tcp/29520/p2p/QmPeer"]


@pytest.mark.parametrize(("part", "port"), [("lighthouse", 29510), ("dht", 29520), ("relay", 29530)])
def test_a_meeting_place_has_one_pod_and_a_service(part, port):
    objects = render(values=EVERYTHING)
    deployment, service = objects["Deployment", f"site-{part}"], objects["Service", f"site-{part}"]
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert (
        not service["spec"]["selector"].items() <= worker(objects)[0]["spec"]["template"]["metadata"]["labels"].items()
    )
    assert service["spec"]["ports"] == [{"name": part, "port": port, "targetPort": part}]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == part
    assert str(port) in container["args"][2]


def test_storage():
    objects = render(values=EVERYTHING)
    claim = objects["PersistentVolumeClaim", "site"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    volumes = {each["name"]: each for each in worker(objects)[1]["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "site"}
    mine = ONE_SITE | {"storage": {"type": "claim", "existingClaim": "mine"}}
    objects = render(values=mine)
    assert ("PersistentVolumeClaim", "mine") not in objects
    assert "mine" in json.dumps(worker(objects)[1]["volumes"])
    volumes = {each["name"]: each for each in worker(render(values=ONE_SITE))[1]["volumes"]}
    assert volumes["data"] == {"name": "data", "emptyDir": {"sizeLimit": "20Gi"}}


def test_monitoring_where_the_cluster_knows_it():
    plain, watched = render(values=ONE_SITE), render("--api-versions", ",".join(KNOWN), values=ONE_SITE)
    assert {kind for kind, _ in watched} - {kind for kind, _ in plain} == {each.rsplit("/")[-1] for each in KNOWN}
    monitor = watched["PodMonitor", "site"]["spec"]
    labels = worker(watched)[0]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"] == [{"port": "metrics", "interval": "15s"}]
    dashboard = watched["GrafanaDashboard", "site"]["spec"]
    assert json.loads(dashboard["json"]) == json.loads((ROOT / "deploy/grafana/isthmus.json").read_text())
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert watched["PrometheusRule", "site"]["spec"] == rules
    off = {"metrics": {"podMonitor": False, "alerts": False, "dashboard": {"enabled": False}}}
    assert render("--api-versions", ",".join(KNOWN), values=ONE_SITE | off).keys() == plain.keys()


def test_what_exalsius_injects_counts():
    each = {"cpu": "16", "memory": "32Gi", "storage": "50Gi", "gpuCount": 1, "gpuVendor": "AMD", "gpuType": "MI300X"}
    injected = {
        "resources": {"replicas": 3, "perReplica": each | {"gpuResourceName": "amd.com/gpu-whole"}},
        "scheduling": {"nodeSelector": {"amd.com/gpu.device-id": "74a1"}, "later": "additions"},
    }
    objects = render(values=ONE_SITE | {"_exalsius": injected, "runtimeClassName": "nvidia"})
    for one in objects.values():
        check_strictly(one)
    job, spec, container = worker(objects)
    assert job["spec"]["completions"] == 3
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "32Gi", "amd.com/gpu-whole": 1}
    assert spec["nodeSelector"] == {"amd.com/gpu.device-id": "74a1"}
    assert "runtimeClassName" not in spec
    assert container["image"].endswith("-rocm")
    assert "50Gi" in json.dumps(spec["volumes"])
    assert job["spec"]["template"]["metadata"]["labels"]["workspace.exalsius.ai/database-id"] == "site"


def test_names_stay_short_enough():
    done = helm("template", "a" * 53, str(CHART), values=ONE_SITE)
    names = [each["metadata"]["name"] for each in yaml.safe_load_all(done.stdout) if each]
    assert max(len(name) for name in names) == 63
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"wrkers": 2}, "additional properties 'wrkers' not allowed"),
        ({"workers": 0}, "at '/workers': minimum"),
        ({"workers": "two"}, "at '/workers': got string, want integer"),
        ({"firstWorker": -1}, "at '/firstWorker': minimum"),
        ({"image": {"tag": "1"}}, "at '/image': additional properties 'tag' not allowed"),
        ({"image": {"default": {"digest": "latest"}}}, "at '/image/default/digest'"),
        ({"resources": {"gpuVendor": "Intel"}}, "at '/resources/gpuVendor': value must be one of"),
        ({"resources": {"memory": "16 GB"}}, "at '/resources/memory'"),
        ({"storage": {"type": "pvc"}}, "at '/storage/type': value must be one of 'emptyDir', 'claim'"),
        ({"storage": {"accessMode": "ReadOnlyMany"}}, "at '/storage/accessMode'"),
        ({"port": 80}, "at '/port': minimum"),
        ({"lighthouse": {"address": "http://lighthouse"}}, "at '/lighthouse/address'"),
        ({"lighthouse": {"service": {"type": "Ingress"}}}, "at '/lighthouse/service/type'"),
        ({"relay": {"service": {"loadBalancerSourceRanges": ["everybody"]}}}, "at '/relay/service/loadBalancer"),
        ({"dht": {"peers": ["dht.example:29520"]}}, "at '/dht/peers/0'"),
        ({"secrets": {"runSecret": "short"}}, "at '/secrets/runSecret'"),
        ({"secrets": {"token": "?"}}, "at '/secrets': additional properties 'token' not allowed"),
        ({"keys": {"secret": "Not A Name"}}, "at '/keys/secret'"),
        ({"metrics": {"port": "9100"}}, "at '/metrics/port': got string, want integer"),
        ({"gracePeriodSeconds": 5}, "at '/gracePeriodSeconds': minimum"),
        ({"queue": "Training Queue"}, "at '/queue'"),
        ({"env": [{"value": "nameless"}]}, "at '/env/0': missing property 'name'"),
        ({"allow": ["rm -rf"]}, "at '/allow/0'"),
        ({"podLabels": {"number": 1}}, "at '/podLabels/number': got number, want string"),
        ({"_exalsius": {"resources": {"replicas": 0}}}, "at '/_exalsius/resources/replicas': minimum"),
        # what goes together, which no schema can say
        ({"run": {}}, "run has no model: give the run's YAML"),
        ({"run": "model: [unclosed"}, "run is no YAML"),
        ({"lighthouse": {"enabled": False}}, "lighthouse.address is missing"),
        (
            {"run": "{model: {type: m}, outer: {transport: {type: torch_dist}}}"},
            "run.outer.transport.type is torch_dist",
        ),
        ({"run": "{model: {type: m}, outer: {transport: hivemind}}"}, "dht.peers is missing"),
        ({"dht": {"enabled": True}}, "dht.enabled needs dht.peerId"),
        ({"relay": {"enabled": True}}, "relay.enabled needs secrets.runSecret or keys.secret"),
        ({"resources": {"gpuCount": 1}}, "resources.gpuVendor is missing"),
        ({"resources": {"gpuCount": 4, "gpuVendor": "AMD"}}, "resources.gpuCount is 4, but run.mesh has 1 ranks"),
    ],
)
def test_wrong_values_are_refused_by_name(values, said):
    assert said in refusal(ONE_SITE | values)


def test_notes_say_what_is_next():
    done = helm("install", "site", str(CHART), "--dry-run=client", values=ONE_SITE | {"workers": 2})
    assert "2 worker(s) from number 0 on: kubectl" in done.stdout, done.stderr
    assert "WARNING: whoever reaches the meeting place can take part" in done.stdout
    assert "Checkpoints end with their Pods" in done.stdout
