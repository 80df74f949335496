"""The chart's entry in exalsius' catalogue: its objects, and the values that its operator passes on."""

import pytest
import yaml
from tests.deploy.helm import CHART, check_custom, render

FILES = ("servicetemplate", "workspaceclass", "example-workspacedeployment")


def released(name):
    """Return an object as a release of the hub fills it in."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    text = (CHART / f"exalsius/{name}.yaml").read_text()
    return yaml.safe_load(text.replace("${VERSION}", version).replace("${VERSION_DASHED}", version.replace(".", "-")))


@pytest.mark.parametrize("name", FILES)
def test_each_satisfies_its_definition(name):
    each = released(name)
    check_custom(each)
    each["spec"]["nobody"] = "knows this"
    with pytest.raises(Exception, match="'nobody' was unexpected"):
        check_custom(each)


def test_they_name_one_another():
    template, offered, wished = [released(name) for name in FILES]
    assert offered["spec"]["serviceTemplate"] == {key: template["metadata"][key] for key in ("name", "namespace")}
    assert wished["spec"]["workspaceClassRef"] == offered["metadata"]["name"]
    assert template["spec"]["helm"]["chartSpec"]["chart"] == yaml.safe_load((CHART / "Chart.yaml").read_text())["name"]
    assert "namespace" not in template["spec"]["helm"]["chartSpec"]["sourceRef"]  # k0rdent would refuse it


def test_what_the_operator_passes_on_renders():
    _, offered, wished = [released(name) for name in FILES]
    resources = offered["spec"]["defaultResources"] | wished["spec"]["resources"]
    resources["perReplica"]["gpuResourceName"] = "nvidia.com/gpu"
    values = offered["spec"]["defaultValues"] | wished["spec"]["values"] | {"_exalsius": {"resources": resources}}
    objects = render(values=values)
    job = objects["Job", "site"]["spec"]
    assert job["completions"] == 2
    assert job["template"]["spec"]["runtimeClassName"] == "nvidia"
    for endpoint in offered["spec"]["accessEndpoints"]:  # the hub's convention
        service = objects["Service", f"site-{endpoint['name']}"]["spec"]
        assert service["ports"][0]["port"] == endpoint["port"]
        assert service["type"] == "ClusterIP"


def test_users_are_asked_for_values_that_the_chart_has():
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for asked in released("workspaceclass")["spec"]["userFacingConfig"]:
        value = defaults
        for key in asked["helmValuePath"].split("."):
            value = value[key]
