"""The Kubernetes examples: valid YAML, valid resources by Kubernetes' own schemas, and consistent with each other.

KServe's and llm-d's own kinds have no schemas in a package; what they embed (pods, containers) is checked by
Kubernetes'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
linter = pytest.importorskip("yamllint.linter")
from yamllint.config import YamlLintConfig

pytestmark = pytest.mark.libraries

EXAMPLES = Path(__file__).parent.parent / "examples" / "kubernetes"
FILES = sorted(EXAMPLES.glob("[!.]*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def pod(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "embedded"}, "spec": spec}


def resources(path: Path) -> list[dict[str, Any]]:
    """What a file holds, as far as Kubernetes itself has schemas for it."""
    found = []
    for document in documents(path):
        kind = document.get("kind")
        if kind == "LLMInferenceService":
            found.append(pod(document["spec"]["template"]))
        elif kind == "InferenceService":
            own = {"minReplicas"}
            found.append(pod({key: value for key, value in document["spec"]["predictor"].items() if key not in own}))
        elif kind == "ScaledObject":
            continue  # in test_kubernetes_server.py
        elif kind is None:
            own = {"modelCommand", "mountModelVolume"}
            containers = [
                {key: value for key, value in container.items() if key not in own}
                for container in document["decode"]["containers"]
            ]
            found.append(pod({"containers": containers}))
        else:
            found.append(document)
    return found


def containers(path: Path) -> list[dict[str, Any]]:
    specs = [r.get("spec", {}).get("template", {}).get("spec", r.get("spec", {})) for r in resources(path)]
    return [container for spec in specs for container in spec.get("containers", [])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_yaml_is_clean(path: Path) -> None:
    config = YamlLintConfig((EXAMPLES / ".yamllint.yaml").read_text())
    assert list(linter.run(path.read_text(), config)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_resources_are_what_kubernetes_takes(path: Path) -> None:
    for resource in resources(path):
        kubernetes_validate.validate(resource, "1.37", strict=True)


def test_the_schemas_do_refuse_what_is_wrong() -> None:
    wrong = resources(EXAMPLES / "deployment.yaml")[1]
    wrong["spec"]["template"]["spec"]["containers"][0]["arguments"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="arguments"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("path", [path for path in FILES if containers(path)], ids=lambda path: path.name)
def test_servers_load_through_penstock_within_their_memory(path: Path) -> None:
    (container,) = containers(path)
    assert "--load-format=penstock" in container["args"]
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    volumes = {
        volume["name"]
        for resource in resources(path)
        for volume in resource.get("spec", {})
        .get("template", {})
        .get("spec", resource.get("spec", {}))
        .get("volumes", [])
    }
    assert mounted == volumes


def test_what_scales_to_zero_is_the_deployment_that_loads_through_penstock() -> None:
    (scaled,) = documents(EXAMPLES / "scale-to-zero.yaml")
    deployments = [d for d in documents(EXAMPLES / "deployment.yaml") if d["kind"] == "Deployment"]
    assert scaled["spec"]["scaleTargetRef"]["name"] in {deployment["metadata"]["name"] for deployment in deployments}
    assert scaled["spec"]["minReplicaCount"] == 0


def test_kserve_does_not_download_before_the_server_starts() -> None:
    (service,) = documents(EXAMPLES / "kserve-llm.yaml")
    assert service["spec"]["storageInitializer"] == {"enabled": False}
    assert service["spec"]["model"]["uri"] in service["spec"]["template"]["containers"][0]["command"]
    (service,) = documents(EXAMPLES / "kserve.yaml")
    assert "storageUri" not in str(service)


def test_secrets_are_placeholders() -> None:
    (secret,) = documents(EXAMPLES / "credentials.yaml")
    assert {value for key, value in secret["stringData"].items() if "KEY" in key} == {"replace-me"}
